"""The norm of the whole gradient, however it is spread."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from muster.parallel.layout import Layout


def local_gradients(
    parameters: Iterable[nn.Parameter], layout: Layout, tied: Collection[nn.Parameter] = ()
) -> dict[int, list[Tensor]]:
    """This rank's gradients, grouped by how many ranks hold the same ones. `tied` ones are held by
    two stages of a pipeline."""
    parameters = list(parameters)
    _sum_shares(parameters)
    stage = layout.world // layout.pipeline
    groups: dict[int, list[Tensor]] = defaultdict(list)
    twice = {id(parameter) for parameter in tied}
    for parameter in parameters:
        holders = stage * 2 if id(parameter) in twice else stage
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = settled(parameter)
            pieces = math.prod(
                gradient.device_mesh.size(i)
                for i, placement in enumerate(gradient.placements)
                if not placement.is_replicate()
            )
            groups[holders // pieces].append(gradient.to_local())
        elif gradient is not None:
            groups[holders].append(gradient)
    return groups


def _sum_shares(parameters: Iterable[nn.Parameter]) -> None:
    """Ranks that each saw a stretch of the sequence hold only their share of a norm's gradient.
    These are many and short, so all of them travel in one message."""
    shared: dict[DeviceMesh, list[nn.Parameter]] = defaultdict(list)
    for p in parameters:
        if isinstance(p, DTensor) and isinstance(p.grad, DTensor):
            (placement, *others), (held, *_) = p.placements, p.grad.placements
            if not others and placement.is_replicate() and held.is_partial("sum"):
                shared[p.device_mesh].append(p)
    for axis, members in shared.items():
        shares = [p.grad.to_local() for p in members]  # type: ignore[union-attr]
        summed = torch.cat([share.flatten() for share in shares])
        dist.all_reduce(summed, group=axis.get_group())
        pieces = summed.split([share.numel() for share in shares])
        for p, share, piece in zip(members, shares, pieces, strict=True):
            p.grad = DTensor.from_local(  # type: ignore[assignment]
                piece.view_as(share), axis, [Replicate()], run_check=False
            )


def settled(parameter: nn.Parameter) -> DTensor:
    """A gradient spread as its parameter is. The backward pass may leave it otherwise."""
    assert isinstance(parameter, DTensor)
    assert isinstance(parameter.grad, DTensor)
    if parameter.grad.placements != parameter.placements:
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    return parameter.grad


def _square(gradients: list[Tensor]) -> float:
    """A CPU adds float32 squares one after the other, which loses digits that a GPU's tree keeps."""
    kind = torch.float64 if gradients[0].device.type == "cpu" else None
    norms = torch.stack(torch._foreach_norm(gradients, dtype=kind))  # type: ignore[call-overload]
    return float(norms.double().square().sum())


def global_norm(groups: dict[int, list[Tensor]], layout: Layout) -> float:
    """Squares summed over all ranks, those that several hold counted once."""
    total = sum(_square(grads) / copies for copies, grads in groups.items())
    if not layout.plain:  # replicas hold the same sum already
        packed = torch.tensor([total], dtype=torch.float64)
        dist.all_reduce(packed)
        total = packed.item()
    else:
        total *= layout.world
    return math.sqrt(total)
