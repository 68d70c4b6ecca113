"""The loss of models that predict tokens."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from muster.data.loader import IGNORE
from muster.models.gpu_kernels import for_gpu

log = logging.getLogger(__name__)


def negative_log_likelihood(
    logits: Tensor, targets: Tensor, vocab: int, reduction: str, label_smoothing: float = 0.0
) -> Tensor:
    """In nats, of the targets `[batch, time]` that count, from `[batch, time, vocab or more]`.

    On a GPU the backward pass writes the gradient of the logits over the logits.
    """
    logits, targets = logits.flatten(0, 1), targets.flatten()
    if _has_kernels(logits):
        rows, wanted = logits.contiguous(), targets.contiguous()
        losses, _ = cross_entropy(rows, wanted, vocab, label_smoothing)
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
    return logits.device.type == "cpu" or _kernels_run(logits.device)


@cache
def _kernels_run(device: torch.device) -> bool:
    """Triton may be missing, or the C compiler that it starts."""
    try:
        cross_entropy(
            torch.zeros(1, 16, device=device), torch.zeros(1, device=device).long(), 16, 0.0
        )
    except Exception as error:
        log.warning(
            "the loss takes more memory and time than it could: its Triton kernels do not run here (%s: %s)",
            type(error).__name__,
            error,
        )
        return False
    return True


@torch.library.custom_op("muster::cross_entropy", mutates_args=())
def cross_entropy(
    logits: Tensor, targets: Tensor, vocab: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """The loss of each row, 0 where its target is `IGNORE` and not a number where it is no other column, and
    what the backward pass needs. Both tensors are contiguous."""
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
