"""Weights and optimizer under names that do not depend on the layout.

    {"model": {name: tensor}, "optimizer": {"step": …, "exp_avg": {name: …}, "exp_avg_sq": {name: …}}}

An optimizer other than AdamW has other slots than `exp_avg` and `exp_avg_sq`, each for the parameters
that have it. The tensors are the live ones, sharded or not, except quantized ones; loading fills them
in place. All layouts use the same names, so a checkpoint loads under any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from muster.parallel.float8 import without_wrapper
from muster.parallel.optimizers.base import DeviceOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's


def named_state(parts: Sequence[nn.Module], optimizer: Optimizer) -> dict[str, Any]:
    init_optimizer_state(optimizer)
    return {
        "model": {
            name: without_wrapper(t) for part in parts for name, t in part.state_dict().items()
        },
        "optimizer": by_slot(
            {name: _saved_state(optimizer, p) for name, p in _trained(parts)}, step_of(optimizer)
        ),
    }


def by_slot(states: dict[str, dict[str, Tensor]], step: Tensor | None) -> dict[str, Any]:
    """{parameter: {slot: tensor}} as {slot: {parameter: tensor}}, with the common step."""
    found: dict[str, Any] = {} if step is None else {"step": step.detach().clone().cpu()}
    for name, slots in states.items():
        for slot, tensor in slots.items():
            found.setdefault(slot, {})[name] = tensor
    return found


def load_optimizer(
    parts: Sequence[nn.Module], optimizer: Optimizer, loaded: dict[str, Any]
) -> None:
    """What `named_state` gave was filled in place. What is not live is written back."""
    set_step(optimizer, loaded)
    if isinstance(optimizer, DeviceOptimizer):
        slots = {k: v for k, v in loaded["optimizer"].items() if k != "step"}
        for name, p in _trained(parts):
            optimizer.restore(p, {slot: held[name] for slot, held in slots.items() if name in held})


def step_of(optimizer: Optimizer) -> Tensor | None:
    """Steps so far, where the optimizer counts them; the same for all parameters."""
    found = (slots["step"] for slots in optimizer.state.values() if "step" in slots)
    return next(found, None)


def set_step(optimizer: Optimizer, loaded: dict[str, Any]) -> None:
    """To the state of each parameter that has it."""
    for slots in optimizer.state.values():
        if "step" in slots:
            slots["step"].copy_(loaded["optimizer"]["step"])


def _trained(parts: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    return ((n, p) for part in parts for n, p in part.named_parameters() if p.requires_grad)


def _saved_state(optimizer: Optimizer, p: Tensor) -> dict[str, Tensor]:
    if isinstance(optimizer, DeviceOptimizer):
        return optimizer.saved_state(p)
    return {moment: optimizer.state[p][moment] for moment in MOMENTS}


def init_optimizer_state(optimizer: Optimizer, parameters: Iterable[Tensor] | None = None) -> None:
    """The state that an optimizer creates at its first step."""
    if parameters is None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
    for p in parameters:
        if not optimizer.state[p]:
            optimizer.state[p] = _new_state(optimizer, p)


def _new_state(optimizer: Optimizer, p: Tensor) -> dict[str, Tensor]:
    if isinstance(optimizer, DeviceOptimizer):
        return optimizer.new_state(p)
    return {
        "step": torch.zeros((), device=p.device if optimizer.defaults["fused"] else "cpu"),
        **{moment: torch.zeros_like(p) for moment in MOMENTS},
    }
