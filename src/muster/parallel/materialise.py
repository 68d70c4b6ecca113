"""Gives a model on the meta device its weights, each rank its own shard."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from muster.models.weights import Region, Weights
from muster.torch_internals import compute_local_shape_and_global_offset

Fill = Callable[[nn.Module, Weights, torch.device, torch.device | None], None]


@torch.no_grad()
def materialise(
    model: nn.Module, weights: Weights, device: torch.device, resting: torch.device | None = None
) -> None:
    """Parameter by parameter: no rank ever holds the whole model, in host or device memory.

    Values are computed on `device` even if they are kept on `resting`, so that offloading does not
    change them.
    """
    model.to_empty(device=resting or device)
    restore_buffers(model, device)
    for name, parameter in model.named_parameters():
        local, region = local_part(parameter)
        if local.numel():
            local.copy_(weights.read(name, tuple(parameter.shape), region, device))


def restore_buffers(model: nn.Module, device: torch.device) -> None:
    """Buffers that no checkpoint holds, in models that compute them when they are built."""
    for module in model.modules():
        restore = getattr(module, "restore_buffers", None)
        if restore is not None:
            restore(device)


def local_part(parameter: Tensor) -> tuple[Tensor, Region]:
    """The local shard of a parameter, and its region in the full tensor."""
    if not isinstance(parameter, DTensor):
        return parameter, tuple(slice(0, n) for n in parameter.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    region = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
    return parameter.to_local(), region
