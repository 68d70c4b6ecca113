"""The worst mistakes of a scored run, word by word, and what its model wrote."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import jiwer

from muster.errors import UnreadableError
from muster.observe.results import AUDIO_FOLDER
from muster.page.document import Difference, Examples, Generated, Mistake
from muster.page.read import RunFiles
from muster.reading.files import open_no_link
from muster.reading.names import number

OPERATIONS = {"equal": "same", "substitute": "sub", "delete": "del", "insert": "ins"}


def examples(files: RunFiles) -> Examples:
    results = files.results
    run, seconds = files.run.path, results.get("recordings") or {}
    step = int((results.get("best") or {}).get("step") or results.get("steps") or 0)
    return {
        "split": str(results.get("scored") or ""),
        "mistakes": [_mistake(found, run, seconds) for found in results.get("worst") or []],
        "generated": [
            *(_answer(found, step) for found in results.get("answers") or []),
            *(_continuation(found) for found in results.get("continuations") or []),
        ],
    }


def open_audio(run: Path, name: str) -> BinaryIO | None:
    """The clip of a mistake; None for any other name, and for a link."""
    if number(name, digits=18) is not None:
        with suppress(OSError, UnreadableError):
            return open_no_link(run / AUDIO_FOLDER / f"{name}.flac", folders=1)
    return None


def _has_audio(run: Path, name: str) -> bool:
    if (file := open_audio(run, name)) is not None:
        file.close()
    return file is not None


def _mistake(found: Mapping[str, Any], run: Path, seconds: Mapping[str, float]) -> Mistake:
    reference, hypothesis = str(found["reference"]), str(found["hypothesis"])
    return {
        "id": str(found["id"]),
        "reference": reference,
        "hypothesis": hypothesis,
        "errors": int(found["edits"]),
        "words": len(reference.split()),
        "seconds": seconds.get(str(found["id"])),
        "audio": _has_audio(run, str(found["id"])),
        "diff": differences(reference, hypothesis),
    }


def differences(reference: str, hypothesis: str) -> list[Difference]:
    """Neighbouring words with the same operation are one entry."""
    if not reference.split():
        return [{"op": "ins", "ref": "", "hyp": hypothesis}] if hypothesis.split() else []
    aligned = jiwer.process_words(reference, hypothesis)
    ref, hyp = aligned.references[0], aligned.hypotheses[0]
    return [
        {
            "op": OPERATIONS[part.type],  # type: ignore[typeddict-item]
            "ref": " ".join(ref[part.ref_start_idx : part.ref_end_idx]),
            "hyp": " ".join(hyp[part.hyp_start_idx : part.hyp_end_idx]),
        }
        for part in aligned.alignments[0]
    ]


def _answer(found: Mapping[str, Any], step: int) -> Generated:
    return {
        "step": step,
        "prompt": str(found["asked"]),
        "text": str(found["answer"]),
        "expected": found.get("expected"),
    }


def _continuation(found: Mapping[str, Any]) -> Generated:
    return {
        "step": int(found["step"]),
        "prompt": str(found["prompt"]),
        "text": str(found["text"]),
        "expected": found.get("expected"),
    }
