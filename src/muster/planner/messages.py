"""Collective and point-to-point operations of a rank, counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from muster.torch_internals import _resolve_process_group

KINDS = {
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "recv",
    "all_to_all": "all_to_all",
    "alltoall": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "scatter": "scatter",
    "barrier": "barrier",
}


@dataclass(frozen=True)
class Message:
    """One collective as one rank sees it: `bytes` are its input (of a `recv`, its output)."""

    kind: str
    bytes: int
    ranks: tuple[int, ...]
    dtype: str


def collective_of(op: Any, args: tuple[Any, ...]) -> Message | None:
    """None for operations that communicate nothing."""
    space, _, name = op._schema.name.partition("::")
    if space not in ("c10d", "_c10d_functional", "_dtensor"):
        return None
    kind = next((kind for stem, kind in KINDS.items() if name.lstrip("_").startswith(stem)), None)
    if kind is None:
        return None
    source = _inputs(op, args, kind)
    return Message(
        kind,
        sum(t.numel() * t.element_size() for t in source),
        tuple(dist.get_process_group_ranks(_group(args))),
        str(source[0].dtype).removeprefix("torch.") if source else "",
    )


def is_collective(op: Any) -> bool:
    return op._schema.name.partition("::")[0] in ("c10d", "_c10d_functional", "_dtensor")


def _inputs(op: Any, args: tuple[Any, ...], kind: str) -> list[Tensor]:
    """The input tensors of this rank."""
    names = [argument.name for argument in op._schema.arguments]
    index = next(
        (
            names.index(n)
            for n in ("input", "input_tensor", "input_tensors", "inputs")
            if n in names
        ),
        0,
    )
    value = args[index]
    while isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple):
        value = value[0]
    return [value] if isinstance(value, Tensor) else [t for t in value if isinstance(t, Tensor)]


def _group(args: tuple[Any, ...]) -> Any:
    for value in args:
        if isinstance(value, dist.ProcessGroup):
            return value
        if hasattr(value, "_type") and callable(value._type):  # a boxed group
            return dist.ProcessGroup.unbox(value)
    names = [value for value in args if isinstance(value, str)]
    return _resolve_process_group(names[-1])
