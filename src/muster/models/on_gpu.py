"""Whether a GPU does the work: kernels there like other sizes and other forms than a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_planning = False


def for_gpu(tensor: Tensor) -> bool:
    """Whether it lies on a GPU, or stands for one that would."""
    return tensor.device.type != "cpu" or _planning


@contextmanager
def planned_for_gpu() -> Iterator[None]:
    """Tensors without values, with which a run is planned, take the ways they would take there."""
    global _planning
    before, _planning = _planning, True
    try:
        yield
    finally:
        _planning = before


def with_values() -> AbstractContextManager[Any]:
    """Also while planning, what is made in here is computed."""
    return _disable_current_modes() if _planning else nullcontext()
