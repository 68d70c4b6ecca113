"""Summary of a corpus: hours, lengths, words and characters, storage, problems."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from muster.data import corpus
from muster.data.corpus import Split
from muster.data.speech.files import AudioFiles, Rows
from muster.data.speech.index import Progress
from muster.data.speech.vocabulary import normalise

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
NAMED_PROBLEMS = 20


@dataclass(frozen=True)
class SplitSummary:
    split: str
    files: int
    layouts: list[str]  # the columns in use and their types
    row_groups: int
    largest_group: int  # bytes of audio
    kinds: list[tuple[str, int]]  # "FLAC 16000 Hz", clips
    clips: int
    hours: float
    seconds: tuple[float, float, float, float]  # shortest, median, 95th percentile, longest
    longest: str  # the clip's name
    histogram: list[tuple[float, float, int]]  # from, to, clips
    words: int
    vocabulary: int
    characters: str
    common: list[tuple[str, int]]
    unreadable: int
    problems: list[tuple[str, str]]  # row, why it cannot be read; the first few


def inspect(
    spec: str, progress: Progress | None = None, decode: bool = False
) -> list[SplitSummary]:
    """One summary per split of `spec`; a single file or glob counts as one.

    `decode` decodes every clip, and the index stores those that fail.
    """
    found: dict[str, list[Path]] = {split: corpus.sibling_split(spec, split) for split in SPLITS}
    if not any(found.values()):
        found = {"all": corpus.files(spec, "data", "train")}
    return [_summarise(split, paths, progress, decode) for split, paths in found.items() if paths]


def _summarise(
    split: str, paths: list[Path], progress: Progress | None, decode: bool
) -> SplitSummary:
    files = AudioFiles(paths)
    rows = files.read_rows(lambda text: normalise(text, lowercase=False), progress, decode)
    readable = np.ones(len(rows), bool)
    readable[list(rows.problems)] = False
    good = rows.without_problems(readable)
    lengths = good.seconds if len(good) else np.zeros(1)
    words, characters = _count(good)
    counts, edges = np.histogram(lengths[: len(good)], bins=min(10, max(1, len(good))))
    first = list(rows.problems.items())[:NAMED_PROBLEMS]
    return SplitSummary(
        split=split,
        files=len(paths),
        layouts=sorted({table.layout for table in files.tables}),
        row_groups=sum(len(table.starts) for table in files.tables),
        largest_group=max(int(table.sizes.max(initial=0)) for table in files.tables),
        kinds=files.kinds.most_common(),
        clips=len(good),
        hours=float(lengths.sum()) / 3600,
        seconds=tuple(float(q) for q in np.quantile(lengths, (0, 0.5, 0.95, 1))),  # type: ignore[arg-type]
        longest=files.name(good[int(lengths.argmax())]) if len(good) else "",
        histogram=[
            (float(a), float(b), int(n))
            for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True)
        ],
        words=sum(words.values()),
        vocabulary=len(words),
        characters="".join(sorted(characters)),
        common=words.most_common(8),
        unreadable=len(rows) - len(good),
        problems=[(files.name(rows[row]), why) for row, why in first],
    )


def _count(rows: Rows) -> tuple[Counter[str], set[str]]:
    words: Counter[str] = Counter()
    characters: set[str] = set()
    for text in rows.texts:
        words.update(text.split())
        characters.update(text)
    return words, characters
