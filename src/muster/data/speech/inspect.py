"""Summary of a speech corpus: hours, lengths, words and characters, storage, problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from muster.data.inspection import Inspection, histogram, spread
from muster.data.problems import Problems
from muster.data.progress import Progress
from muster.data.speech.files import AudioFiles, Rows
from muster.data.speech.overlap import MOST_SECONDS, TICKS, clip_digest
from muster.data.speech.vocabulary import normalise

COMMON = 8


@dataclass(frozen=True)
class _Split:
    files: AudioFiles
    rows: Rows
    good: Rows  # those that can be read

    @property
    def ticks(self) -> NDArray[np.int64]:
        return np.round(self.good.seconds * TICKS).astype(np.int64)


def inspect_speech(
    paths: Mapping[str, list[Path]], progress: Progress | None = None, decode: bool = False
) -> list[Inspection]:
    """One summary per split. Clips are the same where their bytes are: those of equal duration are read to
    compare them, unless they are very many."""
    splits = {name: _read(files, progress, decode) for name, files in paths.items()}
    ticks = np.concatenate([split.ticks for split in splits.values()])
    durations, counts = np.unique(ticks, return_counts=True)
    alike = durations[counts > 1]
    read = np.isin(ticks, alike)
    compared = ticks[read].sum() / TICKS <= MOST_SECONDS
    return [
        _summarise(name, split, alike if compared else alike[:0], compared=bool(compared))
        for name, split in splits.items()
    ]


def _read(paths: list[Path], progress: Progress | None, decode: bool) -> _Split:
    files = AudioFiles(paths)
    rows = files.read_rows(lambda text: normalise(text, lowercase=False), progress, decode)
    readable = np.ones(len(rows), bool)
    readable[list(rows.problems)] = False
    return _Split(files, rows, rows.without_problems(readable))


def _summarise(name: str, split: _Split, alike: NDArray[np.int64], *, compared: bool) -> Inspection:
    files, rows, good = split.files, split.rows, split.good
    words, characters = _count(good)
    problems = Problems()
    for row, why in rows.problems.items():
        problems.add(files.name(rows[row]), why)
    groups = sum(len(table.starts) for table in files.tables)
    largest = max(int(table.sizes.max(initial=0)) for table in files.tables)
    details = [
        *(f"columns: {layout}" for layout in sorted({table.layout for table in files.tables})),
        "audio: " + ", ".join(f"{kind} × {count:,}" for kind, count in files.kinds.most_common()),
        f"row groups: {groups:,}, largest {largest / 1e6:.1f} MB of audio",
        f"words: {sum(words.values()):,}, {len(words):,} different; "
        f"characters: {''.join(sorted(characters))!r}",
        "most common: " + ", ".join(f"{word} {n:,}" for word, n in words.most_common(COMMON)),
    ]
    if not compared:
        details.append("duplicates were not looked for: too many clips are of equal duration")
    return Inspection(
        split=name,
        files=len(files.paths),
        what="clips",
        count=len(good),
        amount=_time(float(good.seconds.sum())),
        unit="s",
        lengths=spread(good.seconds),
        longest=files.name(good[int(good.seconds.argmax())]) if len(good) else "",
        histogram=histogram(good.seconds),
        details=details,
        unreadable=len(rows) - len(good),
        problems=[str(kind) for kind in problems.kinds.values()],
        keys={
            i: digest
            for i in np.flatnonzero(np.isin(split.ticks, alike)).tolist()
            if (digest := clip_digest(files, good[i])) is not None
        },
        name=lambda i: files.name(good[i]),
    )


def _time(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds < 2 * 3600 else f"{seconds / 3600:,.1f} h"


def _count(rows: Rows) -> tuple[Counter[str], set[str]]:
    words: Counter[str] = Counter()
    characters: set[str] = set()
    for text in rows.texts:
        words.update(text.split())
        characters.update(text)
    return words, characters
