"""Giving a model that was built without memory its weights, each rank its own part of each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from muster.models.weights import Region, Weights

Fill = Callable[[nn.Module, Weights, torch.device, torch.device | None], None]


@torch.no_grad()
def materialise(
    model: nn.Module, weights: Weights, device: torch.device, resting: torch.device | None = None
) -> None:
    """Parameter by parameter: no rank ever holds the whole model, on the host or on its device.

    Values come from `device` even where they are to rest elsewhere: where a weight is kept must not
    change what it is.
    """
    model.to_empty(device=resting or device)
    for name, parameter in model.named_parameters():
        local, region = local_part(parameter)
        if local.numel():
            local.copy_(weights.read(name, tuple(parameter.shape), region, device))


def local_part(parameter: Tensor) -> tuple[Tensor, Region]:
    """What this rank holds of a parameter, and where in the whole it lies."""
    if not isinstance(parameter, DTensor):
        return parameter, tuple(slice(0, n) for n in parameter.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    region = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
    return parameter.to_local(), region
