"""Several training corpora in one, each with a share of every epoch.

An epoch has as many samples as all corpora together, of each by its share. A corpus is gone through in
a random order, from its beginning to its end and then in another order, and the next epoch goes on where
this one stopped: none of its samples comes a second time before all of them came once. Which samples
an epoch has depends on (seed, epoch) alone. Of text that is cut elsewhere in every epoch, samples are numbers
of sequences: where a pass spans two epochs, a few tokens may come twice in it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muster.data.account import FileAccount
from muster.data.loader import Source, of_epoch
from muster.errors import DataError, RecipeError

KEY = 0x6D6978  # beside (seed, corpus, pass): no other random numbers are drawn from such a key
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Mixture:
    """`parts`: the corpus of each sample, counted from 0. `weights`: of each corpus."""

    parts: NDArray[np.int64]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        for part in range(len(self.weights)):
            if not (self.parts == part).any():
                raise DataError(
                    f"data.train: source {part + 1} of {len(self.weights)} has no usable sample"
                )
        if not self.counts.all():
            part = int(np.flatnonzero(self.counts == 0)[0])
            raise RecipeError(
                f"data.train: the weight of source {part + 1} gives it no sample of an epoch of {len(self.parts)}; "
                "raise it, or leave the source out"
            )

    @property
    def counts(self) -> Ids:
        """Samples of each corpus in an epoch; what is left by rounding goes to the largest fractions."""
        shares = np.array(self.weights) / sum(self.weights) * len(self.parts)
        counts = np.floor(shares).astype(np.int64)
        left = len(self.parts) - int(counts.sum())
        counts[np.argsort(counts - shares, kind="stable")[:left]] += 1
        return counts

    def lines(self, names: Sequence[str]) -> list[str]:
        """What an epoch takes of each corpus."""
        return [
            f"train: {count / len(self.parts):.1%} of an epoch from {name}: {count:,} samples, where it has "
            f"{int((self.parts == part).sum()):,}"
            for part, (name, count) in enumerate(zip(names, self.counts.tolist(), strict=True))
        ]

    def samples(self, seed: int, epoch: int, groups: NDArray[np.int64] | None = None) -> Ids:
        """The samples of an epoch, corpus by corpus. With `groups`, a pass through a corpus takes one row
        group after the other, so that an epoch that has only a part of it reads few."""
        chosen = []
        for part, count in enumerate(self.counts.tolist()):
            members = np.flatnonzero(self.parts == part)
            place, end = epoch * count, (epoch + 1) * count
            while place < end:
                number, begin = divmod(place, len(members))
                stop = min(len(members), begin + end - place)
                order = self._order(members, (seed, part, number), groups)
                chosen.append(order[begin:stop])
                place += stop - begin
        return np.concatenate(chosen)

    def _order(
        self, members: Ids, key: tuple[int, int, int], groups: NDArray[np.int64] | None
    ) -> Ids:
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((*key, KEY))))
        order = members[rng.permutation(len(members))]
        if groups is None:
            return order
        _, group = np.unique(groups[order], return_inverse=True)
        return order[np.argsort(rng.permutation(group.max() + 1)[group], kind="stable")]

    def fingerprint(self) -> bytes:
        return hashlib.sha256(self.parts.tobytes()).digest()


def mixture_of(source: Source, weights: tuple[float, ...] | None) -> Mixture | None:
    """By the attribute `parts` of a source: the corpus of each sample."""
    if weights is None:
        return None
    parts = getattr(source, "parts", None)
    if parts is None:
        raise RecipeError(
            "data.train: the source of this task does not say which corpus a sample is of (`parts`); leave the "
            "weights out"
        )
    return Mixture(np.asarray(parts, np.int64), weights)


class MixedSource:
    """Sources of one kind as one, the samples of the first before those of the second. None of them reads by
    row groups."""

    groups: None = None

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        self.broken: dict[int, str] = {}  # text is read before the first step
        sizes = [len(source) for source in self.sources]
        self.starts = np.cumsum([0, *sizes])
        self.parts = np.repeat(np.arange(len(sizes)), sizes)
        self.lengths = np.concatenate([source.lengths for source in self.sources])
        self._room = max((getattr(source, "room", 0) for source in self.sources), default=0)

    def __len__(self) -> int:
        return len(self.lengths)

    def of_epoch(self, epoch: int) -> MixedSource:
        return MixedSource([of_epoch(source, epoch) for source in self.sources])

    def load(self, index: int) -> Any:
        source, inside = self._at(index)
        changes: dict[str, Any] = {"id": index}
        sample = source.load(inside)
        if self._room:  # as much as the largest: batches keep one shape
            changes["room"] = self._room
        return dataclasses.replace(sample, **changes)

    def name(self, index: int) -> str:
        source, inside = self._at(index)
        return source.name(inside)

    def preload(self, threads: int) -> None:
        for source in self.sources:
            source.preload(threads)

    def reserve(self, samples: int) -> None:
        for source in self.sources:
            source.reserve(samples)

    def fingerprint(self) -> bytes:
        parts = [source.fingerprint() for source in self.sources]
        return hashlib.sha256(b"".join(parts)).digest()

    def account(self) -> list[FileAccount]:
        return [file for source in self.sources for file in getattr(source, "account", list)()]

    @property
    def left_out(self) -> dict[str, int]:
        return self._sum("left_out")

    @property
    def cut(self) -> dict[str, int]:
        return self._sum("cut")

    def _sum(self, name: str) -> dict[str, int]:
        total: Counter[str] = Counter()
        for source in self.sources:
            total.update(getattr(source, name, {}))
        return dict(total)

    def _at(self, index: int) -> tuple[Source, int]:
        part = int(self.parts[index])
        return self.sources[part], int(index - self.starts[part])
