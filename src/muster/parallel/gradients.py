"""The norm of the global gradient, for any layout."""

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
    _reduce_partial(parameters)
    stage = layout.world // layout.pipeline
    groups: dict[int, list[Tensor]] = defaultdict(list)
    twice = {id(parameter) for parameter in tied}
    for parameter in parameters:
        holders = stage * 2 if id(parameter) in twice else stage
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = redistributed_gradient(parameter)
            shards = math.prod(
                gradient.device_mesh.size(i)
                for i, placement in enumerate(gradient.placements)
                if not placement.is_replicate()
            )
            groups[holders // shards].append(gradient.to_local())
        elif gradient is not None:
            groups[holders].append(gradient)
    return groups


def _reduce_partial(parameters: Iterable[nn.Parameter]) -> None:
    """With sequence parallelism the gradient of a norm is Partial. These are many and small, so one
    all-reduce sums all of them."""
    shared: dict[DeviceMesh, list[nn.Parameter]] = defaultdict(list)
    for p in parameters:
        if isinstance(p, DTensor) and isinstance(p.grad, DTensor):
            (placement, *others), (current, *_) = p.placements, p.grad.placements
            if not others and placement.is_replicate() and current.is_partial("sum"):
                shared[p.device_mesh].append(p)
    for axis, members in shared.items():
        partials = [p.grad.to_local() for p in members]  # type: ignore[union-attr]
        summed = torch.cat([partial.flatten() for partial in partials])
        dist.all_reduce(summed, group=axis.get_group())
        parts = summed.split([partial.numel() for partial in partials])
        for p, partial, part in zip(members, partials, parts, strict=True):
            p.grad = DTensor.from_local(  # type: ignore[assignment]
                part.view_as(partial), axis, [Replicate()], run_check=False
            )


def redistributed_gradient(parameter: nn.Parameter) -> DTensor:
    """A gradient with the placements of its parameter, which the backward pass may not give it."""
    assert isinstance(parameter, DTensor)
    assert isinstance(parameter.grad, DTensor)
    if parameter.grad.placements != parameter.placements:
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    return parameter.grad


def _square(gradients: list[Tensor]) -> Tensor:
    """In float64 on CPUs, whose sequential float32 sum is less exact than a GPU's tree reduction."""
    kind = torch.float64 if gradients[0].device.type == "cpu" else None
    norms = torch.stack(torch._foreach_norm(gradients, dtype=kind))  # type: ignore[call-overload]
    return norms.double().square().sum()


def global_norm(groups: dict[int, list[Tensor]], layout: Layout, device: torch.device) -> Tensor:
    """Squares summed over all ranks, replicated ones counted once. A float64 scalar on `device`."""
    squares = [(_square(grads) / copies).to(device) for copies, grads in groups.items()]
    total = sum(squares, torch.zeros((), dtype=torch.float64, device=device))
    if layout.only_replicas:  # they hold the same sum already
        return (total * layout.world).sqrt()
    dist.all_reduce(total)
    return total.sqrt()


def clip_divisor(norm: Tensor, max_norm: float | None, scale: float) -> Tensor:
    """What gradients are divided by: `scale`, by which the loss was multiplied, and as much as brings
    `norm` down to `max_norm`."""
    if max_norm is None:
        return torch.full_like(norm, scale)
    return ((norm + 1e-6) / max_norm).clamp(min=1.0) * scale
