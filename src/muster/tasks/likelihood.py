"""The loss of models that predict tokens."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from muster.data.loader import IGNORE


def negative_log_likelihood(
    logits: Tensor, targets: Tensor, vocab: int, reduction: str, label_smoothing: float = 0.0
) -> Tensor:
    """In nats, of the targets `[batch, time]` that count, from `[batch, time, vocab or more]`.

    Columns beyond the vocabulary are sliced off, or when compiling, masked: aligned rows are faster.
    Label smoothing would include masked columns.
    """
    logits = logits.flatten(0, 1)
    if logits.shape[-1] > vocab and torch.compiler.is_compiling() and not label_smoothing:
        beyond = torch.arange(logits.shape[-1], device=logits.device) >= vocab
        logits = logits.masked_fill(beyond, -math.inf)
    elif logits.shape[-1] > vocab:
        logits = logits[:, :vocab]
    return F.cross_entropy(
        logits.float(),
        targets.flatten(),
        ignore_index=IGNORE,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
