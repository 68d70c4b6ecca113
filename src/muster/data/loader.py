"""Batches, prefetched by threads, in the order of the plan.

Threads, not processes: decoding and resampling release the GIL, nothing is pickled,
nothing forks after CUDA has started, and a decoded clip is kept once per rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from muster.data.batches import IGNORE as IGNORE
from muster.data.batches import BatchPlan, cut
from muster.errors import DataError


class Source(Protocol):
    """Indexed samples, each with a length that is proportional to its cost.

    `broken`: those that could not be read during training, and why, on this rank. A source may also have
    `of_epoch(epoch)`, which returns a source of as many samples, as long, for that epoch of training.
    """

    broken: dict[int, str]

    @property
    def lengths(self) -> NDArray[np.float64]: ...
    @property
    def groups(self) -> NDArray[np.int64] | None:
        """The row group of each, if samples should be read in that order; see `BatchPlan`."""
        ...

    def __len__(self) -> int: ...
    def load(self, index: int) -> Any: ...
    def name(self, index: int) -> str: ...
    def preload(self, threads: int) -> None: ...
    def reserve(self, samples: int) -> None:
        """Cache as much as `samples` consecutive samples of the plan need."""
        ...

    def fingerprint(self) -> bytes:
        """Hash of what determines the order of an epoch besides the lengths; empty if nothing."""
        ...


def of_epoch(source: Source, epoch: int) -> Source:
    """`source` as it is in this epoch of training."""
    if (find := getattr(source, "of_epoch", None)) is None:
        return source
    found = cast(Source, find(epoch))
    if len(found) != len(source):
        raise DataError(
            f"data.train: of_epoch({epoch}) returned a source of {len(found)} samples, expected as many as "
            f"in every epoch, {len(source)}"
        )
    return found


@dataclass(frozen=True)
class Batch:
    """One micro-batch: padded tensors, and their sizes."""

    ids: list[int] = field(default_factory=list)  #: of its samples, filled in where left out
    tensors: dict[str, Tensor] = field(default_factory=dict)  #: by name
    units: int = 0  #: tokens or clips that the summed loss is divided by, over the global batch
    filled: int = 0  #: elements that are data
    cells: int = 0  #: elements that are computed, with padding; 0: not known, no padding
    amounts: dict[str, float] = field(default_factory=dict)  #: for rates: {"audio_s": 61.5}
    part: int | None = None  #: of every sequence, where context ranks share them: the first is 0

    def identified(self, ids: list[int]) -> Batch:
        """With these ids, and as if without padding, where `collate` left that out."""
        found = replace(self, ids=ids) if not self.ids else self
        return found if self.cells else replace(found, filled=self.units, cells=self.units)

    def to(self, device: torch.device) -> Batch:
        moved = {k: t.to(device, non_blocking=True) for k, t in self.tensors.items()}
        return replace(self, tensors=moved)

    def adding(self, **tensors: Tensor) -> Batch:
        return replace(self, tensors=self.tensors | tensors)

    def padded(self, rows: int) -> Batch:
        """Padded to `rows` rows: the last one repeated with ignored targets."""
        missing = rows - len(self.ids)
        if missing <= 0:
            return self
        more = {k: t[-1:].expand(missing, *t.shape[1:]) for k, t in self.tensors.items()}
        more["targets"] = torch.full_like(more["targets"], IGNORE)
        return replace(self, tensors={k: torch.cat([t, more[k]]) for k, t in self.tensors.items()})

    def pinned(self) -> Batch:
        return replace(self, tensors={k: t.pin_memory() for k, t in self.tensors.items()})

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


@dataclass(frozen=True)
class Inputs:
    """What a model is called with: `args` are the input of the first layer, `shared` are tensors for
    every layer. All of them have the batch as their first dimension."""

    args: tuple[Any, ...]
    shared: dict[str, Tensor] = field(default_factory=dict)


Collate = Callable[[Sequence[Any], int, float], Batch]  # samples, epoch, longest → batch


class Loader:
    """This data rank's micro-batches of each optimizer step."""

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        collate: Collate,
        *,
        rank: int = 0,
        ranks: int = 1,
        accumulation: int = 1,
        workers: int = 2,
        prefetch: int = 4,
        pin: bool = False,
    ) -> None:
        self.source, self.plan, self.collate = source, plan, collate
        self.rank, self.ranks, self.accumulation = rank, ranks, accumulation
        self.workers, self.prefetch, self.pin = workers, max(prefetch, workers), pin

    def micro_batches(self, step: int) -> list[Batch]:
        ids = self.plan.batch(step)
        own = cut(ids, self.plan.lengths, self.ranks, self.accumulation)[self.rank]
        source, longest = self.source_at(step), float(self.plan.lengths[ids].max())
        epoch = self.plan.epoch_of(step)
        return [self._build(source, part.tolist(), epoch, longest) for part in own]

    def source_at(self, step: int) -> Source:
        """The source as it is in the epoch of `step`, for samples and their names."""
        return of_epoch(self.source, self.plan.epoch_of(step))

    def costliest(self, start: int, stop: int) -> int:
        """Of steps `start` … `stop - 1`, as far as they are in one epoch, the one with the longest
        sample, to which its batch is padded."""
        return self._by_cost(start, stop)[-1]

    def median(self, start: int, stop: int) -> int:
        """Of the same steps, the one in the middle by that length."""
        steps = self._by_cost(start, stop)
        return steps[len(steps) // 2]

    def _by_cost(self, start: int, stop: int) -> list[int]:
        end = (self.plan.epoch_of(start) + 1) * self.plan.steps_per_epoch
        lengths, batch = self.plan.lengths, self.plan.batch
        return sorted(range(start, min(stop, end)), key=lambda step: lengths[batch(step)].max())

    def steps(self, start: int, stop: int) -> Iterator[list[Batch]]:
        """The micro-batches of steps `start` … `stop - 1`, prefetched."""
        with ThreadPoolExecutor(self.workers, thread_name_prefix="data") as pool:
            pending: deque[Future[list[Batch]]] = deque()
            upcoming = iter(range(start, stop))
            try:
                for step in range(start, stop):
                    while (
                        len(pending) <= self.prefetch
                        and (later := next(upcoming, None)) is not None
                    ):
                        pending.append(pool.submit(self.micro_batches, later))
                    ready = pending.popleft().result()
                    # `accumulation` may have grown since these were built.
                    current = len(ready) == self.accumulation
                    yield ready if current else self.micro_batches(step)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _build(self, source: Source, ids: list[int], epoch: int, longest: float) -> Batch:
        batch = self.collate([source.load(i) for i in ids], epoch, longest).identified(ids)
        return batch.pinned() if self.pin else batch
