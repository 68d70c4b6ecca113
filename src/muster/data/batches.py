"""The global batch plan: which samples make each optimizer step, whatever the world size.

An epoch's plan is a pure function of (seed, epoch, samples). It does not depend on
ranks: the same list of global batches serves any world size. Only `cut` depends on the layout: it
splits one global batch into ranks × accumulation micro-batches of nearly equal cost.

The position in the data is one integer, the optimizer step. Any step is computed in O(epoch length),
so resuming reads no earlier batch and works on any world size.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from muster.errors import RecipeError

if TYPE_CHECKING:
    from muster.data.mixture import Mixture

Ids = NDArray[np.int64]

IGNORE = -100  # a target that does not count: ignore_index of the loss

MAX_WAIT_POOLS = 4  # pools that a sample waits for others of its window, at most


def keyed_generator(*key: int) -> np.random.Generator:
    """Random numbers that depend on `key` alone: (seed, epoch) for order, (seed, epoch, id) for masks."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


@dataclass(frozen=True)
class BatchPlan:
    """Every global batch of a run.

    The samples of an epoch that do not fill a last batch are left out of that epoch; the shuffle
    picks different ones each time. A batch is therefore always `batch_size` samples.

    Samples are shuffled, and sorted by length within pools so that a batch has similar lengths.
    With `windows`, the length each is padded to, samples of one window are batched together instead,
    at random, without pools. With `groups`, the row group of each sample, an epoch goes through a few
    row groups at a time: those of one segment are read, shuffled and used before the next. With both,
    what does not fill a batch of its window waits for more of it, for at most `MAX_WAIT_POOLS` pools.
    With a `mixture` of several corpora an epoch has as many samples, but those that it chooses, perhaps
    some twice.
    """

    lengths: NDArray[np.float64]
    batch_size: int
    seed: int
    pool_batches: int = 16
    groups: NDArray[np.int64] | None = None
    windows: NDArray[np.float64] | None = None
    mixture: Mixture | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.lengths) < self.batch_size:
            raise RecipeError(
                f"training.global_batch_size: {self.batch_size} is more than the {len(self.lengths)} "
                f"usable samples; set it to {len(self.lengths)} or less, or add data"
            )

    @property
    def steps_per_epoch(self) -> int:
        return len(self.lengths) // self.batch_size

    @property
    def reserve_size(self) -> int:
        """Samples for `Source.reserve`, which caches twice as many: a pool, and with windows half of the
        pools in which samples wait."""
        pool = self.pool_batches * self.batch_size
        return pool if self.windows is None else pool * (2 + MAX_WAIT_POOLS) // 2

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def batch(self, step: int) -> Ids:
        """Sample ids of optimizer step `step`, counted from 0."""
        epoch, within = divmod(step, self.steps_per_epoch)
        with self._lock:  # or every thread of a loader plans the next epoch
            return self._epoch(epoch)[within]

    @lru_cache(maxsize=2)  # noqa: B019 - one plan lives as long as its run
    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        """[steps, batch_size]: shuffled, sorted within pools, batches shuffled again."""
        rng = keyed_generator(self.seed, epoch)
        used = self.steps_per_epoch * self.batch_size
        chosen = np.arange(len(self.lengths))
        if self.mixture is not None:
            chosen = self.mixture.samples(self.seed, epoch, self.groups)
        if self.groups is None:
            return self._batches(chosen[rng.permutation(len(chosen))][:used], rng)
        order, ends = self._in_groups(self.groups[chosen], rng)
        order = chosen[order]
        if self.windows is not None:
            return self._by_window(np.split(order[:used], ends[:-1]), self.windows, rng)
        segments = np.split(order[:used], [end - end % self.batch_size for end in ends])
        return np.concatenate([self._batches(part, rng) for part in segments if len(part)])

    def _in_groups(
        self, groups: NDArray[np.int64], rng: np.random.Generator
    ) -> tuple[Ids, list[int]]:
        """Samples of these row groups in the order of shuffled ones, and where each segment ends: as soon as it has a
        pool of samples. What does not fill its last batch goes into the next."""
        _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
        shuffled = rng.permutation(len(sizes))
        order = np.argsort(np.argsort(shuffled)[group], kind="stable")
        ends, start = [], 0
        for end in np.cumsum(sizes[shuffled]).tolist():
            if end - start >= self.pool_batches * self.batch_size or end == len(order):
                rng.shuffle(order[start:end])
                ends.append(end)
                start = end
        return order, ends

    def _by_window(
        self, segments: list[Ids], windows: NDArray[np.float64], rng: np.random.Generator
    ) -> Ids:
        """[steps, batch_size] of shuffled segments; the rest of each window waits for the next."""
        size, batches = self.batch_size, []
        max_wait, total = MAX_WAIT_POOLS * self.pool_batches * size, sum(map(len, segments))
        rest, since, used = np.zeros(0, np.int64), np.zeros(len(windows), np.int64), 0
        for segment in segments:
            used += len(segment)
            since[segment] = used
            waiting = np.concatenate([rest, segment])  # the oldest first, the longest windows first
            waiting = waiting[np.argsort(-windows[waiting], kind="stable")]
            parts = np.split(waiting, np.flatnonzero(np.diff(windows[waiting])) + 1)
            whole = [part[: len(part) - len(part) % size] for part in parts]
            rest = np.concatenate([part[len(part) - len(part) % size :] for part in parts])
            overdue = (used - since[rest] >= max_wait) | (used == total)
            due, rest = _batch_due(rest, overdue, windows[rest], size)
            batch = np.concatenate([*whole, *due]).reshape(-1, size)
            batches.append(batch[rng.permutation(len(batch))])
        return np.concatenate(batches)

    def _batches(self, samples: Ids, rng: np.random.Generator) -> Ids:
        """[steps, batch_size] of some shuffled samples."""
        if self.windows is not None:
            samples = samples[np.argsort(self.windows[samples], kind="stable")]
        else:
            pool = self.pool_batches * self.batch_size
            for start in range(0, len(samples), pool):
                part = samples[start : start + pool]
                samples[start : start + pool] = part[np.argsort(self.lengths[part], kind="stable")]
        batches = samples.reshape(-1, self.batch_size)
        return batches[rng.permutation(len(batches))]

    def __hash__(self) -> int:
        return id(self)


def _batch_due(
    samples: Ids, due: NDArray[np.bool_], windows: NDArray[np.float64], size: int
) -> tuple[list[Ids], Ids]:
    """Batches of the samples that are due, and the rest. Windows descend: each batch begins with the
    longest window that has one due and continues with shorter ones. Fewer than `size` samples may
    remain."""
    batches, left, start = [], [], 0
    while len(samples) - start >= size and due[start:].any():
        first = start + int(due[start:].argmax())
        begin = max(start, int(np.searchsorted(-windows, -windows[first])))
        begin = min(begin, len(samples) - size)
        left.append(samples[start:begin])
        start = begin + size
        batches.append(samples[begin:start])
    return batches, np.concatenate([*left, samples[start:]])


def cut(ids: Ids, lengths: NDArray[np.float64], ranks: int, accumulation: int) -> list[list[Ids]]:
    """Split one global batch into `[rank][micro-step]` micro-batches.

    Sorted by length, the batch is first split into `accumulation` contiguous segments, so that a
    micro-batch pads little; each segment is then assigned to the ranks in snake order (0 1 2 2 1 0 …),
    so that at every micro-step all ranks have nearly the same cost. Sizes differ by at most one.
    """
    slots = ranks * accumulation
    if len(ids) < slots:
        raise RecipeError(
            f"a global batch of {len(ids)} cannot be split into {ranks} ranks × {accumulation} "
            f"micro-batches; raise training.global_batch_size to at least {slots}, or use fewer ranks"
        )
    ordered = ids[np.argsort(lengths[ids], kind="stable")]
    sizes = _even(len(ids), slots)
    assigned: list[list[Ids]] = [[] for _ in range(ranks)]
    start = 0
    for micro in range(accumulation):
        quota = sizes[micro * ranks : (micro + 1) * ranks]
        segment = ordered[start : start + sum(quota)]
        start += len(segment)
        for rank, part in enumerate(_snake(segment, quota)):
            assigned[rank].append(part)
    return assigned


def _even(total: int, parts: int) -> list[int]:
    """`total` split into `parts` whole numbers that differ by at most one."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def _snake(segment: Ids, quota: Sequence[int]) -> list[Ids]:
    """Assign `segment` in snake order until each part has its quota."""
    parts: list[list[int]] = [[] for _ in quota]
    samples = iter(reversed(segment.tolist()))  # the longest first: the last, short round evens out
    order = list(range(len(quota)))
    while any(len(part) < want for part, want in zip(parts, quota, strict=True)):
        for rank in order:
            if len(parts[rank]) < quota[rank]:
                parts[rank].append(next(samples))
        order.reverse()
    return [np.array(part[::-1], dtype=np.int64) for part in parts]


def eval_shards(
    lengths: NDArray[np.float64],
    windows: NDArray[np.float64] | None,
    world: int,
    batch_size: int,
    groups: NDArray[np.int64] | None = None,
) -> list[list[list[int]]]:
    """Each rank's batches: every sample on exactly one rank, batches of like length and one window.

    With `windows` and `groups` each rank takes neighbouring row groups of a window instead, in any
    order of length, so that few are read and none twice in a window. `windows` rise with `lengths`.
    Ranks may hold different numbers of batches.
    """
    if windows is None:
        windows, groups = np.zeros(len(lengths)), None
    order = np.lexsort((lengths, windows) if groups is None else (lengths, groups, windows))
    shards: list[list[list[int]]] = [[] for _ in range(world)]
    assigned = 0
    for part in np.split(order, np.flatnonzero(np.diff(windows[order])) + 1):
        owner = (np.arange(len(part)) + assigned) % world
        assigned += len(part)
        if groups is not None:
            owner.sort()
        for rank, shard in enumerate(shards):
            mine = part[owner == rank]
            shard += [mine[i : i + batch_size].tolist() for i in range(0, len(mine), batch_size)]
    return shards
