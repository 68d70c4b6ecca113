"""Whether code runs on a GPU, whose kernels favour other sizes and algorithms than a CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from muster.torch_internals import _disable_current_modes

_planning = False


def for_gpu(tensor: Tensor) -> bool:
    """Whether a tensor is on a GPU, or is a fake tensor of the planner."""
    return tensor.device.type != "cpu" or _planning


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
