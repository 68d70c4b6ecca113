"""What GPU kernels favour: other sizes, types and algorithms than a CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from muster.torch_internals import _disable_current_modes

_planning = False


def for_gpu(tensor: Tensor) -> bool:
    """Whether a tensor is on a GPU, or is a fake tensor of the planner."""
    return tensor.device.type != "cpu" or _planning


def residual_stream(x: Tensor) -> Tensor:
    """What enters the blocks of a model: in bfloat16 if autocast computes in it, as it is with the weights that
    FSDP gathers. An embedding's float32 would make every block read and write twice the bytes."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x
    if torch.get_autocast_dtype(kind) == torch.bfloat16:
        return x.to(torch.bfloat16)
    return x


@contextmanager
def planned_for_gpu() -> Iterator[None]:
    """Fake tensors are treated as CUDA tensors in here."""
    global _planning
    before, _planning = _planning, True
    try:
        yield
    finally:
        _planning = before


def with_values() -> AbstractContextManager[Any]:
    """Tensors created in here are real, also while planning."""
    return _disable_current_modes() if _planning else nullcontext()
