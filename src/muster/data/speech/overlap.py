"""Clips of a split that are in the training data too, by their sound."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from muster.data.overlap import Overlap, named_pairs, pairs
from muster.data.speech.audio import Waveform
from muster.errors import DataError

if TYPE_CHECKING:
    from muster.data.speech.files import AudioFiles, ClipRow
    from muster.data.speech.source import SpeechSource

MOST_SECONDS = 10 * 3600.0  # of audio that is read to compare it
TICKS = 16_000  # durations are compared in such parts of a second


def clip_overlap(source: SpeechSource, train: SpeechSource) -> list[Overlap]:
    """By audio, and by text. Only clips of equal duration can have the same audio: the bytes of those are
    compared, and of those that have the same text as well also the samples, which are the same in another
    lossless form. Where too many are of equal duration, only such are compared."""
    mine, theirs = _texts(source), _texts(train)
    same_text = pairs(mine, theirs)
    text = Overlap("text", len(same_text), len(source), "clips", decisive=False)
    ticks = _ticks(source), _ticks(train)
    alike, them = _equal(*ticks)
    said = [
        {i: (int(span[i]), texts[i]) for i in chosen}
        for span, texts, chosen in ((ticks[0], mine, alike), (ticks[1], theirs, them))
    ]
    common = set(said[0].values()) & set(said[1].values())
    close = [[i for i, key in keys.items() if key in common] for keys in said]
    found, note, compared = {}, "too many have the same duration and the same text", 0
    if _few(source, close[0], train, close[1]):
        found = pairs(_digests(source, close[0], _decoded), _digests(train, close[1], _decoded))
        note, compared = (
            "only clips of equal text were compared, since there are so many of equal duration",
            len(source),
        )
        if _few(source, alike, train, them):
            found = pairs(_digests(source, alike, _stored), _digests(train, them, _stored)) | found
            note = ""
    names = named_pairs(found, source, train)
    audio = Overlap("audio", len(found), compared, "clips", names, note)
    return [audio, text]


def _few(mine: SpeechSource, some: list[int], theirs: SpeechSource, others: list[int]) -> bool:
    """Whether they are read in a time that a run may wait for."""
    return bool(mine.lengths[some].sum() + theirs.lengths[others].sum() <= MOST_SECONDS)


def _equal(mine: NDArray[np.int64], theirs: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """The clips whose duration some clip of the other split has."""
    both = np.isin(mine, theirs), np.isin(theirs, mine)
    return np.flatnonzero(both[0]).tolist(), np.flatnonzero(both[1]).tolist()


def _ticks(source: SpeechSource) -> NDArray[np.int64]:
    return np.round(source.rows.seconds * TICKS).astype(np.int64)


def _texts(source: SpeechSource) -> dict[int, int]:
    """A hash of each text, without case and punctuation."""
    return {i: hash(re.sub(r"[\W_]+", " ", t).strip().lower()) for i, t in enumerate(source.texts)}


def clip_digest(files: AudioFiles, row: ClipRow) -> bytes | None:
    """Of a clip's bytes as they are stored; None where it cannot be read."""
    try:
        found = files.clip(row)
        if isinstance(found, str | Path):
            found = Path(found).read_bytes()
    except (DataError, OSError):
        return None  # found, and told, when it is used
    content = found.samples.tobytes() if isinstance(found, Waveform) else found
    return hashlib.blake2b(content, digest_size=16).digest()


def _stored(source: SpeechSource, clip: int) -> bytes | None:
    return clip_digest(source.files, source.rows[clip])


def _decoded(source: SpeechSource, clip: int) -> bytes | None:
    """Of a clip's samples, whatever form they are stored in."""
    try:
        return hashlib.blake2b(source.peek(clip).tobytes(), digest_size=16).digest()
    except DataError:
        return None


def _digests(
    source: SpeechSource,
    clips: Iterable[int],
    digest: Callable[[SpeechSource, int], bytes | None],
) -> dict[int, bytes]:
    """Of each clip that can be read."""
    return {i: found for i in clips if (found := digest(source, i)) is not None}
