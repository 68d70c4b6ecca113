"""Batches, prepared ahead by threads, in the order the plan dictates.

Threads, not processes: decoding and resampling release the interpreter lock, nothing is pickled,
nothing forks after CUDA has started, and a decoded clip is kept once per rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from muster.data.batches import BatchPlan, cut

IGNORE = -100  # a target that does not count


class Source(Protocol):
    """Indexed samples, each with a length that stands for its cost.

    `broken`: those that could not be read when their turn came, and why. A rank knows of its own.
    """

    broken: dict[int, str]

    @property
    def lengths(self) -> NDArray[np.float64]: ...
    @property
    def groups(self) -> NDArray[np.int64] | None:
        """Where each lies, if samples should be read in stretches; see `BatchPlan`."""
        ...

    def __len__(self) -> int: ...
    def load(self, index: int) -> Any: ...
    def name(self, index: int) -> str: ...
    def preload(self, threads: int) -> None: ...
    def reserve(self, samples: int) -> None:
        """So many samples, next to each other in the plan, will be wanted at a time."""
        ...

    def fingerprint(self) -> bytes:
        """What else than the lengths decides the order of an epoch; empty where nothing does."""
        ...


@dataclass(frozen=True)
class Batch:
    """One micro-batch: padded tensors, and what the loop must know about them."""

    ids: list[int]
    tensors: dict[str, Tensor]
    units: int  # tokens or clips that share the loss; summed over the global batch, it normalises
    filled: int  # cells that carry data …
    cells: int  # … of all cells computed; the difference is padding
    amounts: dict[str, float] = field(default_factory=dict)  # for rates: {"audio_s": 61.5}

    def to(self, device: torch.device) -> Batch:
        moved = {k: t.to(device, non_blocking=True) for k, t in self.tensors.items()}
        return replace(self, tensors=moved)

    def adding(self, **tensors: Tensor) -> Batch:
        return replace(self, tensors=self.tensors | tensors)

    def padded(self, rows: int) -> Batch:
        """As many rows as asked for, the last one repeated with targets that do not count."""
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
    """What a model is called with: `args` enter at the first layer, `shared` are tensors that every
    layer may look at. All of them have the batch as their first dimension."""

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
        mine = cut(ids, self.plan.lengths, self.ranks, self.accumulation)[self.rank]
        epoch, longest = self.plan.epoch_of(step), float(self.plan.lengths[ids].max())
        return [self._build(part.tolist(), epoch, longest) for part in mine]

    def costliest(self, start: int, stop: int) -> int:
        """Of steps `start` … `stop - 1`, as far as they are in one epoch, the one with the longest
        sample: everything beside it is padded to that, or nearly as long."""
        end = (self.plan.epoch_of(start) + 1) * self.plan.steps_per_epoch
        lengths, batch = self.plan.lengths, self.plan.batch
        return max(range(start, min(stop, end)), key=lambda step: float(lengths[batch(step)].max()))

    def steps(self, start: int, stop: int) -> Iterator[list[Batch]]:
        """The micro-batches of steps `start` … `stop - 1`, each ready before it is asked for."""
        with ThreadPoolExecutor(self.workers, thread_name_prefix="data") as pool:
            ahead: deque[Future[list[Batch]]] = deque()
            upcoming = iter(range(start, stop))
            try:
                for step in range(start, stop):
                    while (
                        len(ahead) <= self.prefetch and (later := next(upcoming, None)) is not None
                    ):
                        ahead.append(pool.submit(self.micro_batches, later))
                    ready = ahead.popleft().result()
                    # `accumulation` may have grown since these were cut.
                    current = len(ready) == self.accumulation
                    yield ready if current else self.micro_batches(step)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _build(self, ids: list[int], epoch: int, longest: float) -> Batch:
        batch = self.collate([self.source.load(i) for i in ids], epoch, longest)
        return batch.pinned() if self.pin else batch
