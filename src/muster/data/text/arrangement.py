"""Where an epoch cuts the stream into sequences: the order of the documents, and the first cut.

The stream `end doc end doc … end` begins and ends with the same token, so it is used as a ring: after
the last `end` comes the first document. An epoch goes once around, from an offset on. What is left
before that offset does not fill a sequence. How many sequences there are depends on neither the order
nor the offset, and every token has the same chance to be left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from muster.data.batches import keyed_generator

Packing = Literal["shuffled", "shifted", "fixed"]
Positions = NDArray[np.int64]

KEY = 0x7061636B  # beside (seed, epoch), from which batches are drawn


@dataclass(frozen=True)
class Arrangement:
    """Documents in some order. Each holds the `end` before it and all of its tokens but its own `end`."""

    stored: NDArray[Any]  # where each document starts in the stream on disk
    starts: NDArray[Any]  # where each starts here, ascending
    total: int  # tokens of all documents
    order: Positions | None = None  # which document each is; None: as stored
    offset: int = 0

    def document(self, number: Any) -> Any:
        return number if self.order is None else self.order[number]

    def number(self, position: Any) -> Any:
        """Which of the documents here holds this position of the epoch."""
        return np.searchsorted(self.starts, self._on_ring(position), side="right") - 1

    def place(self, begin: int, count: int) -> tuple[Positions, Positions]:
        """Of the inputs `begin` … `begin + count - 1` of the epoch: where each is in the stream on disk,
        and in its document."""
        positions = np.arange(begin, begin + count)
        numbers = self.number(positions)
        within = self._on_ring(positions) - self.starts[numbers]
        return self.stored[self.document(numbers)] + within, within

    def most_documents(self, length: int, count: int) -> int:
        """In any of the epoch's first `count` sequences of `length`."""
        begin = np.arange(count) * length
        last = np.minimum(begin + length, self.total) - 1
        first, final = self.number(begin), self.number(last)
        around = len(self.starts) * (self._on_ring(last) < self._on_ring(begin))
        return int((final - first + around).max()) + 1

    def _on_ring(self, position: Any) -> Any:
        return (position + self.offset) % self.total


def arrange(
    packing: Packing, stored: NDArray[Any], total: int, seed: int, epoch: int
) -> Arrangement:
    """A function of its arguments alone, so any rank may compute it at any time."""
    if packing == "fixed":
        return Arrangement(stored, stored, total)
    rng = keyed_generator(seed, epoch, KEY)
    offset = int(rng.integers(total))
    if packing == "shifted":
        return Arrangement(stored, stored, total, offset=offset)
    order = rng.permutation(len(stored))
    sizes = np.diff(stored, append=total)[order]
    return Arrangement(stored, np.cumsum(sizes) - sizes, total, order, offset)
