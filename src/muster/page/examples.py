"""The worst mistakes of a scored run, word by word, and what its model wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jiwer

from muster.observe.results import AUDIO_FOLDER
from muster.page.document import Difference, Examples, Generated, Mistake
from muster.page.read import RunFiles

OPERATIONS = {"equal": "same", "substitute": "sub", "delete": "del", "insert": "ins"}


def examples(files: RunFiles) -> Examples:
    results = files.results
    folder, seconds = files.run.path / AUDIO_FOLDER, results.get("recordings") or {}
    step = int((results.get("best") or {}).get("step") or results.get("steps") or 0)
    return {
        "split": str(results.get("scored") or ""),
        "mistakes": [_mistake(found, folder, seconds) for found in results.get("worst") or []],
        "generated": [
            *(_answer(found, step) for found in results.get("answers") or []),
            *(_continuation(found) for found in results.get("continuations") or []),
        ],
    }


def audio_file(run: Path, name: str) -> Path | None:
    """The clip of a mistake; None for any other name."""
    path = run / AUDIO_FOLDER / f"{name}.flac"
    return path if name.isascii() and name.isdigit() and path.is_file() else None


def _mistake(found: Mapping[str, Any], folder: Path, seconds: Mapping[str, float]) -> Mistake:
    reference, hypothesis = str(found["reference"]), str(found["hypothesis"])
    return {
        "id": str(found["id"]),
        "reference": reference,
        "hypothesis": hypothesis,
        "errors": int(found["edits"]),
        "words": len(reference.split()),
        "seconds": seconds.get(str(found["id"])),
        "audio": (folder / f"{found['id']}.flac").is_file(),
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
