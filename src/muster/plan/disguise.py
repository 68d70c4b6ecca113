"""Fake tensors on the CPU that take the ways a GPU would take.

A build of torch without CUDA cannot carry fake CUDA tensors through autograd, so planning runs on
fake CPU tensors everywhere. What CUDA does otherwise is put right here: which operations autocast
keeps in float32, and norms that are one kernel there and many here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from muster.models.on_gpu import planned_for_gpu
from muster.parallel.fsdp import DTYPES

# Of CUDA's list, what models use. CPU autocast leaves these in bfloat16.
IN_FLOAT32 = ("layer_norm", "group_norm", "softmax", "log_softmax", "nll_loss", "cross_entropy")


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Around a whole step: a checkpointed block computes again within the backward pass, where torch
    would leave out a mode; hence the functions themselves are replaced."""
    real = {name: getattr(F, name) for name in (*IN_FLOAT32, "rms_norm", "ctc_loss")}
    changed = {name: _wide(real[name]) for name in IN_FLOAT32}
    changed |= {"rms_norm": _rms_norm(real["rms_norm"]), "ctc_loss": _ctc_loss}
    try:
        for name, function in changed.items():
            setattr(F, name, function)
        with planned_for_gpu():
            yield
    finally:
        for name, function in real.items():
            setattr(F, name, function)


def autocast(precision: str) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", DTYPES[precision]) if precision in DTYPES else nullcontext()


def _wide(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Any, **kwargs: Any) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            args = tree_map(_widen, args)
        return function(*args, **kwargs)

    return run


def _widen(value: Any) -> Any:
    low = isinstance(value, Tensor) and value.dtype in DTYPES.values()
    return value.float() if low else value


def _rms_norm(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A GPU has one kernel for RMSNorm with a weight; a compiler makes its own."""

    def run(
        x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if weight is None or type(x) is not FakeTensor or _traced():
            return real(x, shape, weight, eps)
        return _RMSNorm.apply(x, weight)

    return run


def _traced() -> bool:
    """Whether AOTAutograd looks on."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def _ctc_loss(log_probs: Tensor, targets: Tensor, *_: Any, **__: Any) -> Tensor:
    return _CTC.apply(log_probs, targets)


class _CTC(torch.autograd.Function):
    """Shapes only: a table of every frame × every symbol and the blanks between, each way."""

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, targets: Tensor) -> Tensor:
        time, clips, _ = log_probs.shape
        symbols = targets.shape[-1] if targets.dim() == 2 else -(-targets.shape[0] // clips)
        table = log_probs.new_zeros(clips, time, 2 * symbols + 1)
        ctx.save_for_backward(log_probs, table)
        return log_probs.new_zeros(clips)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        log_probs, table = ctx.saved_tensors
        torch.zeros_like(table)
        return torch.exp(log_probs), None


class _RMSNorm(torch.autograd.Function):
    """Shapes and work only: two passes over the input, as a native layer norm does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, weight.dtype)
        out, _, inverse = torch.ops.aten.native_layer_norm(
            x.to(wide), list(weight.shape), weight.to(wide), None, 1e-5
        )
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, inverse = ctx.saved_tensors
        grad = grads[0]
        dx, dw, _ = torch.ops.aten.native_layer_norm_backward(
            grad,
            x.to(grad.dtype),
            list(weight.shape),
            inverse,
            inverse,
            weight.to(grad.dtype),
            None,
            [True, True, False],
        )
        return dx.to(x.dtype), dw.to(weight.dtype)
