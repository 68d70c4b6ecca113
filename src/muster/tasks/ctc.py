"""The CTC loss of a batch, and what it needs of the data."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Targets = tuple[Tensor, Tensor]  # the symbols of all clips in one row; how many are each clip's


def ctc_targets(symbols: Sequence[Sequence[int]]) -> Targets:
    """0 symbols for a broken clip, which then adds nothing to the loss."""
    flat = torch.tensor([s for each in symbols for s in each], dtype=torch.long)
    return flat, torch.tensor([len(each) for each in symbols])


def summed_ctc_loss(logits: Tensor, lengths: Tensor, targets: Targets, blank: int) -> Tensor:
    """-ln p(symbols | audio), summed over clips: a float32 scalar.

    `logits` [batch, time, symbols] of any scale, `lengths` [batch] in frames.
    """
    symbols, counts = targets
    log_probs = F.log_softmax(logits.float(), dim=-1).transpose(0, 1)
    losses = F.ctc_loss(log_probs, symbols, lengths, counts, blank=blank, reduction="none")
    return (losses * (counts > 0)).sum()


def frames_needed(symbols: Sequence[int]) -> int:
    """One per symbol and one blank between equal neighbours."""
    return len(symbols) + sum(a == b for a, b in itertools.pairwise(symbols))
