"""Weights and optimizer under names that do not depend on the layout.

    {"model": {name: tensor}, "optimizer": {"step": …, "exp_avg": {name: …}, "exp_avg_sq": {name: …}}}

The tensors are the live ones, sharded as they lie, so saving reads them and loading fills them in
place. Every layout uses these names, which is all that moving between layouts takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


def live(parts: Sequence[nn.Module], optimizer: Optimizer) -> dict[str, Any]:
    begin(optimizer)
    named = {name: p for part in parts for name, p in part.named_parameters() if p.requires_grad}
    steps = [optimizer.state[p]["step"] for p in named.values()]
    return {
        "model": {name: t for part in parts for name, t in part.state_dict().items()},
        "optimizer": {
            "step": steps[0].detach().clone().cpu(),
            **{
                moment: {name: optimizer.state[p][moment] for name, p in named.items()}
                for moment in MOMENTS
            },
        },
    }


def set_step(optimizer: Optimizer, loaded: dict[str, Any]) -> None:
    """The moments were filled in place; the count of steps is copied to each of its holders."""
    for held in optimizer.state.values():
        held["step"].copy_(loaded["optimizer"]["step"])


def begin(optimizer: Optimizer, parameters: Iterable[Tensor] | None = None) -> None:
    """The state that AdamW would make at its first step."""
    fused = bool(optimizer.defaults["fused"])
    if parameters is None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
    for p in parameters:
        if not optimizer.state[p]:
            optimizer.state[p] = {
                "step": torch.zeros((), device=p.device if fused else "cpu"),
                **{moment: torch.zeros_like(p) for moment in MOMENTS},
            }
