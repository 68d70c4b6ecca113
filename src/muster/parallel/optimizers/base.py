"""What the optimizers share: local shards, gradients over a divisor, steps that are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from muster.parallel.float8 import without_wrapper


class DeviceOptimizer(Optimizer):
    """An optimizer with the contract of torch's fused kernels: `grad_scale` and `found_inf`, float32
    scalars on the parameters' device, or None."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    _skipped: Tensor | None = None  # a boolean on the device

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first step."""
        raise NotImplementedError

    def saved_state(self, p: Tensor) -> dict[str, Tensor]:
        """What a checkpoint keeps of `p`, in a form that does not depend on the layout; `step` apart."""
        return {name: t for name, t in self.state[p].items() if name != "step"}

    def restore(self, p: Tensor, saved: dict[str, Tensor]) -> None:
        """From `saved_state`, which was loaded in place: nothing is left to do where it was the live one."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self._skipped = None if self.found_inf is None else self.found_inf > 0
        for group in self.param_groups:
            members = [p for p in group["params"] if p.grad is not None and self.updates(group)]
            for p in members:
                if not self.state[p]:
                    self.state[p] = self.new_state(p)
            if members:
                gradients = [local(p.grad) for p in members]
                if self.grad_scale is not None:
                    torch._foreach_div_(gradients, self.grad_scale)
                self.update(group, members, gradients)

    def updates(self, group: dict[str, Any]) -> bool:
        """Whether `update` takes this group."""
        return True

    def update(self, group: dict[str, Any], members: list[Tensor], gradients: list[Tensor]) -> None:
        """One group of parameters that have gradients; `gradients` are local, and may be overwritten."""
        raise NotImplementedError

    def set_(self, target: Tensor, value: Tensor) -> None:
        """`value` into `target`, unless this step is skipped."""
        if self._skipped is not None:
            value = torch.where(self._skipped, target, value)
        target.copy_(value)


class CountingOptimizer(DeviceOptimizer):
    """Counts the steps that were not skipped, in one tensor on the device for all parameters."""

    _count: Tensor | None = None

    def count(self, p: Tensor) -> Tensor:
        if self._count is None:
            self._count = torch.zeros((), device=p.device)
        return self._count

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        count = self.count(local(self.param_groups[0]["params"][0]))
        count += 1 if self.found_inf is None else 1 - self.found_inf
        super().step()


def local(tensor: Tensor | None) -> Tensor:
    """The local shard, without what torchao wraps it in for FSDP; other tensors unchanged."""
    assert tensor is not None
    plain = without_wrapper(tensor)
    return plain.to_local() if isinstance(plain, DTensor) else plain


def zeros_like(p: Tensor) -> Tensor:
    return torch.zeros_like(without_wrapper(p))


Reduction = tuple[
    Tensor, list[tuple[DeviceMesh, int]]
]  # what to sum over which dimensions of a mesh


def sharding(p: Tensor, dims: Iterable[int] | None = None) -> list[tuple[DeviceMesh, int]]:
    """The dimensions of a parameter's mesh that shard one of its `dims`; any of them by default."""
    if not isinstance(p, DTensor):
        return []
    wanted = None if dims is None else {d % p.ndim for d in dims}
    return [
        (p.device_mesh, i)
        for i, placement in enumerate(p.placements)
        if not placement.is_replicate() and (wanted is None or placement.dim in wanted)  # type: ignore[attr-defined]
    ]


def sum_over_ranks(reductions: Iterable[Reduction]) -> None:
    """In place: all that is summed over the same ranks in one all-reduce. Every rank calls it with the
    same tensors in the same order."""
    together: dict[tuple[DeviceMesh, int], list[Tensor]] = {}
    for tensor, axes in reductions:
        for axis in axes:
            together.setdefault(axis, []).append(tensor)
    for (mesh, i), tensors in sorted(together.items(), key=lambda item: item[0][1]):
        flat = torch.cat([t.flatten() for t in tensors]).to(
            mesh.device_type
        )  # from an offloaded shard
        dist.all_reduce(flat, group=mesh.get_group(i))
        for tensor, summed in zip(tensors, _split(flat, tensors), strict=True):
            tensor.copy_(summed)


def _split(flat: Tensor, tensors: list[Tensor]) -> Iterator[Tensor]:
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        yield part.view_as(tensor)


def as_shards(p: Tensor, mine: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`mine` as the local part of a tensor of `shape` that is sharded as `p` is, where it has more than one
    row or column there; replicated along the others."""
    if not isinstance(p, DTensor):
        return mine
    placements = [
        Replicate() if not q.is_replicate() and shape[q.dim] == 1 != p.shape[q.dim] else q  # type: ignore[attr-defined]
        for q in p.placements
    ]
    made = DTensor.from_local(
        mine,
        p.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
    return made if made.device == mine.device else made.to(mine.device)  # an offloaded shard stays
