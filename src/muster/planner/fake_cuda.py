"""Fake CPU tensors that dispatch as CUDA tensors would.

A build of torch without CUDA cannot carry fake CUDA tensors through autograd, so planning runs on
fake CPU tensors everywhere. The differences are patched here: the operations that autocast runs in
float32 on CUDA, and norms that are one fused kernel there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from muster.models.gpu_kernels import planned_for_gpu
from muster.parallel.dtypes import DTYPES
from muster.torch_internals import FakeTensor, _get_dispatch_mode, _TorchDispatchModeKey, tree_map

# The subset of CUDA's autocast list that models use. CPU autocast runs these in bfloat16.
IN_FLOAT32 = ("layer_norm", "group_norm", "softmax", "log_softmax", "nll_loss", "cross_entropy")


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Around a whole step. Functions are patched instead of a torch function mode, which would not be
    active when the backward pass recomputes a checkpointed block."""
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
    """CUDA has a fused kernel for RMSNorm with a weight; compiled graphs decompose it."""

    def run(
        x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if weight is None or type(x) is not FakeTensor or _traced():
            return real(x, shape, weight, eps)
        return _RMSNorm.apply(x, weight)

    return run


def _traced() -> bool:
    """Whether AOTAutograd is tracing."""
    return _get_dispatch_mode(_TorchDispatchModeKey.PROXY) is not None


def _ctc_loss(log_probs: Tensor, targets: Tensor, *_: Any, **__: Any) -> Tensor:
    return _CTC.apply(log_probs, targets)


class _CTC(torch.autograd.Function):
    """Shapes only: alpha and beta are [frames, 2 × symbols + 1] per clip."""

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
    """Shapes and cost only, taken from native_layer_norm."""

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
