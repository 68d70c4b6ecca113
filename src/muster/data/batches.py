"""The global batch plan: which samples make each optimizer step, whatever the world size.

An epoch's plan is a pure function of (seed, epoch, lengths). It knows nothing of ranks: the same
list of global batches serves one process or sixty-four. Only `cut` looks at the layout, and all it
does is deal one global batch into ranks × accumulation micro-batches of nearly equal cost.

The place in the data is one integer, the optimizer step. Any step is found in O(epoch length)
without walking there, so resuming skips nothing and works on any world size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from muster.errors import RecipeError

Ids = NDArray[np.int64]


def keyed_generator(*key: int) -> np.random.Generator:
    """Random numbers that depend on `key` alone: (seed, epoch) for order, (seed, epoch, id) for masks."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


@dataclass(frozen=True)
class BatchPlan:
    """Every global batch of a run.

    The samples of an epoch that do not fill a last batch are left out of that epoch; the shuffle
    picks different ones each time. A batch is therefore always `batch_size` samples.
    """

    lengths: NDArray[np.float64]
    batch_size: int
    seed: int
    pool_batches: int = 16

    def __post_init__(self) -> None:
        if len(self.lengths) < self.batch_size:
            raise RecipeError(
                f"training.global_batch_size: {self.batch_size} is more than the {len(self.lengths)} "
                f"usable samples; set it to {len(self.lengths)} or less, or add data"
            )

    @property
    def steps_per_epoch(self) -> int:
        return len(self.lengths) // self.batch_size

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def batch(self, step: int) -> Ids:
        """Sample ids of optimizer step `step` (counted from 0), in order of rising length."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return self._epoch(epoch)[within]

    @lru_cache(maxsize=2)  # noqa: B019 - one plan lives as long as its run
    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        """[steps, batch_size]: shuffled, sorted by length within pools, batches shuffled again."""
        rng = keyed_generator(self.seed, epoch)
        order = rng.permutation(len(self.lengths))[: self.steps_per_epoch * self.batch_size]
        pool = self.pool_batches * self.batch_size
        for start in range(0, len(order), pool):
            part = order[start : start + pool]
            order[start : start + pool] = part[np.argsort(self.lengths[part], kind="stable")]
        batches = order.reshape(self.steps_per_epoch, self.batch_size)
        return batches[rng.permutation(len(batches))]

    def __hash__(self) -> int:
        return id(self)


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


def eval_shard(
    lengths: NDArray[np.float64], rank: int, world: int, batch_size: int
) -> list[list[int]]:
    """This rank's share of the samples, each on exactly one rank, in batches of like length.

    Ranks may hold different numbers of batches: evaluation has no collective until its end.
    """
    mine = np.argsort(lengths, kind="stable")[rank::world].tolist()
    return [mine[i : i + batch_size] for i in range(0, len(mine), batch_size)]
