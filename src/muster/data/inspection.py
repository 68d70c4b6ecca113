"""What `muster data inspect` says of a split, in the same form for speech, text and images."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from muster.data.overlap import pairs

BINS = 10
LONG_TAIL = 20.0  # longest ÷ median from which the bins of a histogram grow
NAMED = 3

Bin = tuple[float, float, int]  # from, to, samples


@dataclass(frozen=True)
class Inspection:
    split: str
    files: int
    what: str  # clips, documents, conversations, images
    count: int
    amount: str  # "0.90 h of audio"
    unit: str  # of the lengths: s, characters, px
    lengths: tuple[float, float, float, float]  # shortest, median, 95th percentile, longest
    longest: str  # the sample's name
    histogram: list[Bin]
    details: list[str]
    unreadable: int
    problems: list[str]
    keys: Mapping[int, Hashable] = field(repr=False)  # equal for samples with equal contents
    name: Callable[[int], str] = field(repr=False)
    twins: dict[int, int] = field(default_factory=dict)  # samples that an earlier one equals
    in_train: dict[int, int] = field(default_factory=dict)  # and that a training sample equals

    @property
    def heading(self) -> str:
        return f"{self.split}: {self.count:,} {self.what}, {self.amount}, {self.files:,} file(s)"

    def duplicates(self) -> list[str]:
        """In words; nothing where there are none."""
        lines = []
        if self.twins:
            named = [
                f"{self.name(i)} is {self.name(j)}" for i, j in list(self.twins.items())[:NAMED]
            ]
            lines.append(f"{len(self.twins):,} duplicates: {_some(named, len(self.twins))}")
        if self.in_train:
            named = [self.name(i) for i in list(self.in_train)[:NAMED]]
            found = _some(named, len(self.in_train))
            lines.append(
                f"{len(self.in_train):,} {self.what} are in the training data too: {found}"
            )
        return lines


def _some(named: Sequence[str], count: int) -> str:
    return "; ".join(named) + (" …" if count > len(named) else "")


def find_duplicates(parts: Sequence[Inspection]) -> list[Inspection]:
    """With the samples that are there twice, and those that are in the split `train` too."""
    train = next((part for part in parts if part.split == "train"), None)
    found = []
    for part in parts:
        twins = {i: j for i, j in pairs(part.keys, part.keys).items() if i != j}
        in_train = pairs(part.keys, train.keys) if train and part is not train else {}
        found.append(replace(part, twins=twins, in_train=in_train))
    return found


def spread(lengths: NDArray[np.float64]) -> tuple[float, float, float, float]:
    values = np.quantile(lengths, (0, 0.5, 0.95, 1)) if len(lengths) else np.zeros(4)
    return tuple(float(value) for value in values)  # type: ignore[return-value]


def histogram(lengths: NDArray[np.float64]) -> list[Bin]:
    """Of ten bins, equal ones or, where few are much longer than the others, growing ones."""
    if not len(lengths):
        return []
    low, high = float(lengths.min()), float(lengths.max())
    if low == high:
        return [(low, high, len(lengths))]
    bins = min(BINS, len(lengths))
    edges: int | NDArray[np.float64] = bins
    if high > LONG_TAIL * float(np.median(lengths)):
        edges = np.geomspace(max(low, 1.0), high, bins + 1)
        edges[0], edges[-1] = min(low, edges[0]), high
    counts, edges = np.histogram(lengths, bins=edges)
    pairs = zip(edges[:-1], edges[1:], counts, strict=True)
    return [(float(a), float(b), int(n)) for a, b, n in pairs]
