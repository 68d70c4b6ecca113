"""Stochastic gradient descent with momentum, by torch's fused kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from muster.parallel.optimizers.base import DeviceOptimizer, local, zeros_like


class SGD(DeviceOptimizer):
    """torch.optim.SGD(fused=True) for sharded parameters too, which torch's does not take. Weight decay
    is added to the gradient."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": zeros_like(p)} if self.defaults["momentum"] else {}

    def update(self, group: dict[str, Any], members: list[Tensor], gradients: list[Tensor]) -> None:
        buffers = [local(self.state[p]["momentum_buffer"]) for p in members if self.state[p]]
        torch._fused_sgd_(
            [local(p) for p in members],
            gradients,
            buffers,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            grad_scale=None,  # already divided
            found_inf=self.found_inf,
        )
