"""Triton kernels of the cross entropy: one program per row of logits.

torch's own, and what Inductor makes of it, move two to three times the bytes: float32 copies of the
logits, or a gradient beside them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from muster.data.loader import IGNORE

BLOCK = 2048  # columns at a time
WARPS = 4


def forward(
    logits: Tensor, targets: Tensor, losses: Tensor, sums: Tensor, vocab: int, smoothing: float
) -> None:
    """Fill `losses`, and `sums` with the logarithm of each row's sum of exponentials."""
    _forward[(len(logits),)](
        logits,
        logits.stride(0),
        targets,
        losses,
        sums,
        vocab,
        logits.shape[1],
        smoothing,
        SMOOTHED=smoothing > 0,
        IGNORED=IGNORE,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


def backward(
    logits: Tensor, targets: Tensor, sums: Tensor, grads: Tensor, vocab: int, smoothing: float
) -> None:
    """Overwrite `logits` by their gradient, given `grads` of the losses."""
    _backward[(len(logits),)](
        logits,
        logits.stride(0),
        targets,
        sums,
        grads,
        vocab,
        logits.shape[1],
        smoothing,
        IGNORED=IGNORE,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


@triton.jit
def _load(logits, columns, vocab, width):
    """In float32, -inf beyond the vocabulary. The mask of the load is the width, which if it is a multiple
    of 16 lets a thread load several columns at once."""
    x = tl.load(logits + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
    return tl.where(columns < vocab, x, -float("inf"))


@triton.jit
def _forward(
    logits,
    stride,
    targets,
    losses,
    sums,
    vocab,
    width,
    smoothing,
    SMOOTHED: tl.constexpr,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    logits += row * stride
    largest = -float("inf")
    total = 0.0  # of exp(x - largest)
    plain = 0.0  # of x
    if target != IGNORED:
        for start in range(0, vocab, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = _load(logits, columns, vocab, width)
            larger = tl.maximum(largest, tl.max(x, 0))
            shift = tl.where(larger == -float("inf"), 0.0, larger)
            total = total * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift), 0)
            if SMOOTHED:
                plain += tl.sum(tl.where(columns < vocab, x, 0.0), 0)
            largest = larger
        inside = (target >= 0) & (target < vocab)
        chosen = tl.load(logits + target, mask=inside, other=float("nan")).to(tl.float32)
        log_sum = largest + tl.log(total)
        expected = (1.0 - smoothing) * chosen
        if SMOOTHED:
            expected += smoothing * plain / vocab
        tl.store(losses + row, log_sum - expected)
        tl.store(sums + row, log_sum)
    else:
        tl.store(losses + row, 0.0)
        tl.store(sums + row, 0.0)


@triton.jit
def _backward(
    logits,
    stride,
    targets,
    sums,
    grads,
    vocab,
    width,
    smoothing,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    log_sum = tl.load(sums + row)
    grad = tl.load(grads + row).to(tl.float32)
    logits += row * stride
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        found = tl.zeros([BLOCK], dtype=tl.float32)
        if target != IGNORED:
            inside = columns < vocab
            x = _load(logits, columns, vocab, width)
            wanted = tl.where(columns == target, 1.0 - smoothing, 0.0) + smoothing / vocab
            found = tl.where(inside, (tl.exp(x - log_sum) - wanted) * grad, 0.0)
        tl.store(logits + columns, found.to(logits.dtype.element_ty), mask=columns < width)
