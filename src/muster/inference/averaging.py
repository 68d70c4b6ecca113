"""Model averaging: the mean of checkpoints, and interpolation of two models."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from muster.models.weights import Weights


def mean(states: Iterator[dict[str, Tensor]], count: int) -> dict[str, Tensor]:
    """One at a time besides the sum, which is in float64: what never learnt stays as it is to the
    bit. What is no fraction, such as a counter, is the first's."""
    total = next(states)
    if count == 1:
        return total
    formats = {name: value.dtype for name, value in total.items() if value.is_floating_point()}
    for name in formats:
        total[name] = total[name].double()
    for _ in range(count - 1):
        for name, value in next(states).items():
            if name in formats:
                total[name] += value
    for name, dtype in formats.items():
        total[name] = (total[name] / count).to(dtype)
    return total


def blend(state: dict[str, Tensor], base: Weights, share: float) -> None:
    """In place: linear interpolation, `base` + `share` × (`state` − `base`)."""
    for name, value in state.items():
        if value.is_floating_point():
            everything = (slice(None),) * value.ndim
            start = base.read(name, tuple(value.shape), everything, value.device)
            state[name] = torch.lerp(start, value.float(), share).to(value.dtype)
