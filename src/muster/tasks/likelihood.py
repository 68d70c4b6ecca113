"""The loss of models that predict tokens."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from muster.data.loader import IGNORE
from muster.models.gpu_kernels import for_gpu


def negative_log_likelihood(
    logits: Tensor, targets: Tensor, vocab: int, reduction: str, label_smoothing: float = 0.0
) -> Tensor:
    """In nats, of the targets `[batch, time]` that count, from `[batch, time, vocab or more]`.

    On a GPU the backward pass writes the gradient of the logits over the logits.
    """
    logits, targets = logits.flatten(0, 1), targets.flatten()
    if _has_kernels(logits):
        losses, _ = cross_entropy(logits.contiguous(), targets, vocab, label_smoothing)
        return losses.sum() if reduction == "sum" else losses
    return F.cross_entropy(
        logits[:, :vocab].float(),
        targets,
        ignore_index=IGNORE,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def _has_kernels(logits: Tensor) -> bool:
    """On a GPU, also one that is only planned for."""
    if not for_gpu(logits) or hasattr(logits, "placements"):  # a DTensor
        return False
    return logits.device.type == "cpu" or _triton_is_installed()


@cache
def _triton_is_installed() -> bool:
    return find_spec("triton") is not None


@torch.library.custom_op("muster::cross_entropy", mutates_args=())
def cross_entropy(
    logits: Tensor, targets: Tensor, vocab: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """The loss of each row, 0 where its target is `IGNORE`, and what the backward pass needs."""
    from muster.tasks import cross_entropy_kernels

    losses, sums = _one_per_row(logits)
    cross_entropy_kernels.forward(logits, targets, losses, sums, vocab, smoothing)
    return losses, sums


@torch.library.custom_op("muster::cross_entropy_backward", mutates_args=("logits",))
def cross_entropy_backward(
    logits: Tensor, targets: Tensor, sums: Tensor, grads: Tensor, vocab: int, smoothing: float
) -> None:
    from muster.tasks import cross_entropy_kernels

    cross_entropy_kernels.backward(logits, targets, sums, grads.contiguous(), vocab, smoothing)


@cross_entropy.register_fake
def _(logits: Tensor, targets: Tensor, vocab: int, smoothing: float) -> tuple[Tensor, Tensor]:
    return _one_per_row(logits)


def _one_per_row(logits: Tensor) -> tuple[Tensor, Tensor]:
    return (
        logits.new_empty(len(logits), dtype=torch.float32),
        logits.new_empty(len(logits), dtype=torch.float32),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, targets, ctx.vocab, ctx.smoothing = inputs
    ctx.save_for_backward(logits, targets, output[1])


def _gradient(ctx: Any, grads: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    logits, targets, sums = ctx.saved_tensors
    cross_entropy_backward(logits, targets, sums, grads, ctx.vocab, ctx.smoothing)
    return logits.detach(), None, None, None


cross_entropy.register_autograd(_gradient, setup_context=_save)
