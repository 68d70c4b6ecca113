"""Adafactor: the second moment of a matrix as one number per row and one per column."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from muster.parallel.optimizers.base import (
    CountingOptimizer,
    Reduction,
    as_shards,
    local,
    sharding,
    sum_over_ranks,
)

BETA2_DECAY = -0.8
SMALLEST_RMS = 1e-3  # a weight matrix counts as at least so large
EPS = torch.finfo(torch.float32).eps


class Adafactor(CountingOptimizer):
    """torch.optim.Adafactor with its default options. Means and norms are those of whole matrices: the
    shards of a parameter sum them over the ranks that hold the others."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        mine = local(p)
        step = {"step": self.count(mine)}
        if mine.ndim < 2:
            return step | {"variance": _zeros(p, p.shape)}
        *batch, rows, columns = p.shape
        return step | {
            "row_var": _zeros(p, (*batch, rows, 1)),
            "col_var": _zeros(p, (*batch, 1, columns)),
        }

    def update(self, group: dict[str, Any], members: list[Tensor], gradients: list[Tensor]) -> None:
        weights = [local(p) for p in members]
        fresh = self._steps().double().pow(BETA2_DECAY).float()  # weight of this step's means
        sizes = [w.square().sum() for w in weights]
        rows, columns = [], []
        reductions: list[Reduction] = []
        for p, g, size in zip(members, gradients, sizes, strict=True):
            reductions.append((size, sharding(p)))
            if p.ndim < 2:
                continue
            rows.append(g.square().sum(-1, keepdim=True))
            columns.append(g.square().sum(-2, keepdim=True))
            reductions += [(rows[-1], sharding(p, [-1])), (columns[-1], sharding(p, [-2]))]
        sum_over_ranks(reductions)
        sums = iter(zip(rows, columns, strict=True))
        means = []
        for p, g in zip(members, gradients, strict=True):
            if p.ndim < 2:
                variance = local(self.state[p]["variance"])
                self.set_(variance, variance.lerp(g.square(), fresh))
                continue
            row, column = next(sums)
            row_var, col_var = (local(self.state[p][name]) for name in ("row_var", "col_var"))
            self.set_(row_var, row_var.lerp(row / p.shape[-1], fresh))
            self.set_(col_var, col_var.lerp(column / p.shape[-2], fresh))
            means.append((row_var.sum(-2, keepdim=True), sharding(p, [-2])))
        sum_over_ranks(means)
        totals = iter([total for total, _ in means])
        norms: list[Reduction] = []
        for p, g in zip(members, gradients, strict=True):
            self._precondition(p, g, next(totals) if p.ndim >= 2 else None)
            norms.append((g.square().sum(), sharding(p)))
        sum_over_ranks(norms)
        rate = (self._steps().rsqrt()).clamp(max=group["lr"])
        decayed = 1 - group["lr"] * group["weight_decay"]
        for p, w, g, size, (norm, _) in zip(members, weights, gradients, sizes, norms, strict=True):
            alpha = (size.sqrt() / math.sqrt(p.numel())).clamp(min=SMALLEST_RMS) * rate
            too_large = (norm.sqrt() / math.sqrt(p.numel())).clamp(min=1.0)
            self.set_(w, w * decayed - g * (alpha / too_large))

    def _steps(self) -> Tensor:
        """This step's number; also of a skipped one, which is not counted."""
        assert self._count is not None
        return self._count.clamp(min=1.0)

    def _precondition(self, p: Tensor, g: Tensor, total: Tensor | None) -> None:
        """The gradient, in place, over the root of its estimated second moment."""
        state = self.state[p]
        if total is None:
            estimate = local(state["variance"]).clone()
        else:
            estimate = local(state["row_var"]) * local(
                state["col_var"]
            )  # [n, 1] × [1, m], or empty
            estimate /= (total / p.shape[-2]).clamp(min=EPS)
        g.mul_(estimate.clamp_(min=EPS * EPS).rsqrt_())


def _zeros(p: Tensor, shape: Iterable[int]) -> Tensor:
    """Sharded as `p` is, except where `shape` has one row or column instead of many."""
    shape, mine = tuple(shape), local(p)
    own = [
        1 if n == 1 != whole else size
        for n, whole, size in zip(shape, p.shape, mine.shape, strict=True)
    ]
    return as_shards(p, torch.zeros(own, dtype=mine.dtype, device=mine.device), shape)
