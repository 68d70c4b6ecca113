"""Recordings of the worst mistakes, kept in the run directory: the data may be gone when somebody listens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import soundfile

from muster.observe.results import AUDIO_FOLDER
from muster.tasks.base import Example

log = logging.getLogger(__name__)


def keep_recordings(
    folder: Path, source: Any, worst: Sequence[Example], count: int, rate: int
) -> dict[str, float]:
    """Write those of the first `count` as FLAC; their seconds by id. Empty where `source` has no audio. Those
    of an earlier end of the run are removed. What cannot be written is left out with a line in the log."""
    kept: dict[str, float] = {}
    into = folder / AUDIO_FOLDER
    for old in into.glob("*.flac"):
        old.unlink(missing_ok=True)
    if not hasattr(source, "peek"):
        return kept
    for example in worst[:count]:
        try:
            samples = source.peek(example.id)
            into.mkdir(exist_ok=True)
            soundfile.write(into / f"{example.id}.flac", samples, rate)
        except Exception as error:  # arrow and buckets have errors of their own
            log.warning("the recording of a mistake is not kept: %s", error)
            break
        kept[str(example.id)] = round(len(samples) / rate, 2)
    return kept
