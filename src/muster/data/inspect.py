"""What is in a corpus: hours, lengths, words and characters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from muster.data import corpus
from muster.data.corpus import Split
from muster.data.parquet import AudioFiles
from muster.data.text import normalise

SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@dataclass(frozen=True)
class SplitSummary:
    split: str
    files: int
    clips: int
    hours: float
    seconds: tuple[float, float, float, float]  # shortest, median, 95th percentile, longest
    histogram: list[tuple[float, float, int]]  # from, to, clips
    words: int
    vocabulary: int
    characters: str
    common: list[tuple[str, int]]
    unreadable: int


def inspect(spec: str) -> list[SplitSummary]:
    """One summary per split of `spec`; a single file or glob counts as one."""
    found: dict[str, list[Path]] = {split: corpus.sibling_split(spec, split) for split in SPLITS}
    if not any(found.values()):
        found = {"all": corpus.files(spec, "data", "train")}
    return [_summarise(split, paths) for split, paths in found.items() if paths]


def _summarise(split: str, paths: list[Path]) -> SplitSummary:
    rows = AudioFiles(paths).rows
    good = [row for row in rows if not row.problem]
    lengths = np.array([row.seconds for row in good] or [0.0])
    texts = [normalise(row.text, lowercase=False) for row in good]
    words = Counter(word for text in texts for word in text.split())
    counts, edges = np.histogram(lengths[: len(good)], bins=min(10, max(1, len(good))))
    return SplitSummary(
        split=split,
        files=len(paths),
        clips=len(good),
        hours=float(lengths.sum()) / 3600,
        seconds=tuple(float(q) for q in np.quantile(lengths, (0, 0.5, 0.95, 1))),  # type: ignore[arg-type]
        histogram=[
            (float(a), float(b), int(n))
            for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True)
        ],
        words=sum(words.values()),
        vocabulary=len(words),
        characters="".join(sorted({char for text in texts for char in text})),
        common=words.most_common(8),
        unreadable=len(rows) - len(good),
    )
