"""The global batch plan: which samples make each optimizer step, whatever the world size.

An epoch's plan is a pure function of (seed, epoch, samples). It knows nothing of ranks: the same
list of global batches serves one process or sixty-four. Only `cut` looks at the layout, and all it
does is deal one global batch into ranks × accumulation micro-batches of nearly equal cost.

The place in the data is one integer, the optimizer step. Any step is found in O(epoch length)
without walking there, so resuming skips nothing and works on any world size.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from muster.errors import RecipeError

Ids = NDArray[np.int64]

CARRIED = 4  # pools that are gone through while a sample waits for others of its window, at most


def keyed_generator(*key: int) -> np.random.Generator:
    """Random numbers that depend on `key` alone: (seed, epoch) for order, (seed, epoch, id) for masks."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


@dataclass(frozen=True)
class BatchPlan:
    """Every global batch of a run.

    The samples of an epoch that do not fill a last batch are left out of that epoch; the shuffle
    picks different ones each time. A batch is therefore always `batch_size` samples.

    Samples are shuffled, and sorted by length within pools so that a batch holds like lengths.
    Where what each is padded to is known, as `windows`, samples of one window are put together
    instead, at random, and pools need no bound. With `groups`, the row group of each sample, a
    corpus is gone through a few row groups at a time: those of one stretch are read, shuffled and
    used up before the next. With both, what does not fill a batch of its window waits for more of
    it, until `CARRIED` further pools have been gone through.
    """

    lengths: NDArray[np.float64]
    batch_size: int
    seed: int
    pool_batches: int = 16
    groups: NDArray[np.int64] | None = None
    windows: NDArray[np.float64] | None = None
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
    def reach(self) -> int:
        """Samples for `Source.reserve`, which makes room for twice as many: a pool, and with windows
        half of those in which samples wait."""
        pool = self.pool_batches * self.batch_size
        return pool if self.windows is None else pool * (2 + CARRIED) // 2

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
        if self.groups is None:
            return self._batches(rng.permutation(len(self.lengths))[:used], rng)
        order, ends = self._through_groups(self.groups, rng)
        if self.windows is not None:
            return self._by_window(np.split(order[:used], ends[:-1]), self.windows, rng)
        stretches = np.split(order[:used], [end - end % self.batch_size for end in ends])
        return np.concatenate([self._batches(part, rng) for part in stretches if len(part)])

    def _through_groups(
        self, groups: NDArray[np.int64], rng: np.random.Generator
    ) -> tuple[Ids, list[int]]:
        """Samples in an order that goes through shuffled row groups, and where each stretch ends:
        as soon as it has a pool of samples. What does not fill its last batch goes into the next."""
        _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
        turns = rng.permutation(len(sizes))
        order = np.argsort(np.argsort(turns)[group], kind="stable")
        ends, start = [], 0
        for end in np.cumsum(sizes[turns]).tolist():
            if end - start >= self.pool_batches * self.batch_size or end == len(order):
                rng.shuffle(order[start:end])
                ends.append(end)
                start = end
        return order, ends

    def _by_window(
        self, stretches: list[Ids], windows: NDArray[np.float64], rng: np.random.Generator
    ) -> Ids:
        """[steps, batch_size] of shuffled stretches; the rest of each window waits for the next."""
        size, batches = self.batch_size, []
        patience, total = CARRIED * self.pool_batches * size, sum(map(len, stretches))
        rest, since, gone = np.zeros(0, np.int64), np.zeros(len(windows), np.int64), 0
        for stretch in stretches:
            gone += len(stretch)
            since[stretch] = gone
            waiting = np.concatenate([rest, stretch])  # the oldest first, the longest windows first
            waiting = waiting[np.argsort(-windows[waiting], kind="stable")]
            parts = np.split(waiting, np.flatnonzero(np.diff(windows[waiting])) + 1)
            whole = [part[: len(part) - len(part) % size] for part in parts]
            rest = np.concatenate([part[len(part) - len(part) % size :] for part in parts])
            overdue = (gone - since[rest] >= patience) | (gone == total)
            due, rest = _take_due(rest, overdue, windows[rest], size)
            made = np.concatenate([*whole, *due]).reshape(-1, size)
            batches.append(made[rng.permutation(len(made))])
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


def _take_due(
    samples: Ids, due: NDArray[np.bool_], windows: NDArray[np.float64], size: int
) -> tuple[list[Ids], Ids]:
    """Batches that take up all that is due, and what is left. Windows fall: each batch begins with
    the longest window that has something due and goes on into shorter ones. Fewer than `size`
    samples may have to wait once more."""
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
    """Deal one global batch into `[rank][micro-step]` micro-batches.

    Sorted by length, the batch is first cut into `accumulation` stretches of neighbours, so that a
    micro-batch pads little; each stretch is then dealt to the ranks back and forth (0 1 2 2 1 0 …),
    so that at every micro-step all ranks carry nearly the same cost. Sizes differ by at most one.
    """
    slots = ranks * accumulation
    if len(ids) < slots:
        raise RecipeError(
            f"a global batch of {len(ids)} cannot be cut into {ranks} ranks × {accumulation} "
            f"micro-batches; raise training.global_batch_size to at least {slots}, or use fewer ranks"
        )
    ordered = ids[np.argsort(lengths[ids], kind="stable")]
    sizes = _even(len(ids), slots)
    dealt: list[list[Ids]] = [[] for _ in range(ranks)]
    start = 0
    for micro in range(accumulation):
        quota = sizes[micro * ranks : (micro + 1) * ranks]
        stretch = ordered[start : start + sum(quota)]
        start += len(stretch)
        for rank, part in enumerate(_deal(stretch, quota)):
            dealt[rank].append(part)
    return dealt


def _even(total: int, parts: int) -> list[int]:
    """`total` split into `parts` whole numbers that differ by at most one."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def _deal(stretch: Ids, quota: Sequence[int]) -> list[Ids]:
    """Deal `stretch` back and forth until each hand holds its quota."""
    hands: list[list[int]] = [[] for _ in quota]
    cards = iter(reversed(stretch.tolist()))  # the longest first: the last, short round evens out
    forth = list(range(len(quota)))
    while any(len(hand) < want for hand, want in zip(hands, quota, strict=True)):
        for rank in forth:
            if len(hands[rank]) < quota[rank]:
                hands[rank].append(next(cards))
        forth.reverse()
    return [np.array(hand[::-1], dtype=np.int64) for hand in hands]


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
    dealt = 0
    for part in np.split(order, np.flatnonzero(np.diff(windows[order])) + 1):
        owner = (np.arange(len(part)) + dealt) % world
        dealt += len(part)
        if groups is not None:
            owner.sort()
        for rank, shard in enumerate(shards):
            mine = part[owner == rank]
            shard += [mine[i : i + batch_size].tolist() for i in range(0, len(mine), batch_size)]
    return shards
