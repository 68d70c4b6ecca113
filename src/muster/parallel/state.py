"""Weights and optimizer under names that do not depend on the layout.

    {"model": {name: tensor}, "optimizer": {"step": …, "exp_avg": {name: …}, "exp_avg_sq": {name: …}}}

The tensors are the live ones, sharded or not; loading fills them in place. All layouts use the same
names, so a checkpoint loads under any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from muster.parallel.float8 import without_wrapper

MOMENTS = ("exp_avg", "exp_avg_sq")


def named_state(parts: Sequence[nn.Module], optimizer: Optimizer) -> dict[str, Any]:
    init_optimizer_state(optimizer)
    named = {name: p for part in parts for name, p in part.named_parameters() if p.requires_grad}
    steps = [optimizer.state[p]["step"] for p in named.values()]
    return {
        "model": {
            name: without_wrapper(t) for part in parts for name, t in part.state_dict().items()
        },
        "optimizer": {
            "step": steps[0].detach().clone().cpu(),
            **{
                moment: {name: optimizer.state[p][moment] for name, p in named.items()}
                for moment in MOMENTS
            },
        },
    }


def set_step(optimizer: Optimizer, loaded: dict[str, Any]) -> None:
    """The moments were filled in place; `step` is copied to the state of each parameter."""
    for slots in optimizer.state.values():
        slots["step"].copy_(loaded["optimizer"]["step"])


def init_optimizer_state(optimizer: Optimizer, parameters: Iterable[Tensor] | None = None) -> None:
    """The state that AdamW creates at its first step."""
    fused = bool(optimizer.defaults["fused"])
    if parameters is None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
    for p in parameters:
        if not optimizer.state[p]:
            optimizer.state[p] = {
                "step": torch.zeros((), device=p.device if fused else "cpu"),
                **{moment: torch.zeros_like(p) for moment in MOMENTS},
            }
