"""The parallel plan of a model that brings none: its repeated layers are its blocks."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Protocol

from torch import nn

from muster.models.plan import ParallelPlan

KEPT = "_muster_plan"  # the attribute of a model with the plan that was made for it
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

log = logging.getLogger(__name__)


class Named(Protocol):
    """A task, which may name the classes of its model's repeated layers."""

    @property
    def blocks(self) -> tuple[str, ...]: ...


def plan_of(model: nn.Module, task: Named | None = None) -> ParallelPlan:
    """The model's own `plan`; else one with the task's `blocks`, or with the blocks that are found, which it then
    has too. Such a plan allows ddp, fsdp, hsdp and ZeRO, not tensor or pipeline parallelism."""
    for name in ("plan", KEPT):
        found = getattr(model, name, None)
        if isinstance(found, ParallelPlan):
            return found
    blocks = task.blocks if task else ()
    names = blocks or repeated_layers(model)
    if names:
        how = "named by the task" if blocks else "repeated layers"
        log.info("parallel plan of %s: blocks %s (%s)", type(model).__name__, ", ".join(names), how)
    else:
        log.info(
            "parallel plan of %s: no repeated layers, so it is sharded as a whole; name some as `blocks`",
            type(model).__name__,
        )
    plan = ParallelPlan(names)
    setattr(model, KEPT, plan)
    return plan


def repeated_layers(model: nn.Module) -> tuple[str, ...]:
    """Classes of which a ModuleList or Sequential has two or more, each with layers and parameters of its
    own; the outermost where such lists are nested."""
    names: list[str] = []
    _collect(model, names)
    inner = {
        type(m).__name__
        for one in model.modules()
        if type(one).__name__ in names
        for m in list(one.modules())[1:]
    }
    return tuple(name for name in dict.fromkeys(names) if name not in inner)


def _collect(module: nn.Module, names: list[str]) -> None:
    children = list(module.children())
    repeated: set[str] = set()
    if isinstance(module, nn.ModuleList | nn.Sequential):
        counts = Counter(type(child).__name__ for child in children if _composite(child))
        repeated = {name for name, count in counts.items() if count > 1}
        names += [name for name in counts if name in repeated]
    for child in children:
        if type(child).__name__ not in repeated:
            _collect(child, names)


def _composite(module: nn.Module) -> bool:
    if isinstance(module, CONTAINERS):
        return False
    return any(True for _ in module.children()) and any(True for _ in module.parameters())
