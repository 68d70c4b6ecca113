"""Models on the meta device, which have shapes and no values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

RANDOM = (Tensor.normal_, Tensor.uniform_)  # called by models themselves


@contextmanager
def on_meta() -> Iterator[None]:
    """Tensors created in here are on the meta device."""
    with torch.device("meta"), _Uninitialised():
        yield


def parameters_of(build: Callable[[], nn.Module]) -> list[nn.Parameter]:
    """Of the model that `build` makes: on the meta device, or where a user's model computes with values
    as it is built, for real."""
    try:
        with on_meta():
            return list(build().parameters())
    except Exception:
        return list(build().parameters())


def allocate(model: nn.Module) -> None:
    """Onto the CPU, in place. Under a FakeTensorMode `to_empty` makes a fake tensor of each meta tensor
    first, which takes most of its time."""
    model._apply(_allocated)


def _allocated(tensor: Tensor) -> Tensor:
    if type(tensor) not in (Tensor, nn.Parameter):  # DTensor
        return torch.empty_like(tensor, device="cpu")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


class _Uninitialised(TorchFunctionMode):
    """Nothing is initialised. On the meta device that would only import torch._dynamo, which takes
    seconds."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function in RANDOM or getattr(function, "__module__", None) == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)
