"""The process group of a run, and its small collectives outside of gradients."""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from muster.errors import LaunchError
from muster.parallel.layout import AXES, Layout
from muster.torch_internals import _set_pg_timeout

Backend = Literal["auto", "nccl", "gloo"]


@dataclass(frozen=True)
class Mesh:
    """One rank of the process group. `background` is a second group, for the checkpoint
    thread: two threads must never share one. `axes` has a group for each axis of the layout; DDP,
    ZeRO and a single process need none."""

    rank: int
    local_rank: int
    layout: Layout
    device: torch.device
    background: Any
    axes: DeviceMesh | None = None
    limit: datetime.timedelta = datetime.timedelta(seconds=600)  # of every collective
    local_world: int = 1  # ranks on this machine

    @property
    def world(self) -> int:
        return self.layout.world

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        return self.layout.data_rank(self.rank)

    @property
    def is_reporter(self) -> bool:
        """Whether this rank reports for those that share its data: it has the last layers, and so the loss."""
        last = self.layout.pipeline_rank(self.rank) == self.layout.pipeline - 1
        return last and self.layout.tensor_rank(self.rank) == 0

    def sum(self, *values: float, everyone: float = 0.0) -> list[float]:
        """Each value summed over the ranks that see different data, in float64, and after them
        `everyone`, summed over all ranks."""
        if self.world == 1:
            return [*values, everyone]
        packed = torch.tensor([v if self.is_reporter else 0.0 for v in values], dtype=torch.float64)
        packed = torch.cat([packed, torch.tensor([everyone], dtype=torch.float64)])
        dist.all_reduce(packed)
        return packed.tolist()

    def gather(self, value: Any) -> list[Any]:
        """all_gather_object: the value of every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def any_rank(self, value: bool) -> bool:
        """Whether `value` is true on any rank, if a forward pass takes all of them; else on this one."""
        return self.sum(everyone=value)[0] > 0 if self.layout.collective_forward else value

    def barrier(self) -> None:
        if self.world > 1:
            self.sum()

    def with_layout(self, layout: Layout) -> Mesh:
        """The same ranks in another layout. A collective call."""
        layout.check_world(self.world)
        return replace(self, layout=layout, axes=_axes(layout, self.device, self.limit))


def bind_device(local_rank: int) -> torch.device:
    """This rank's device, made current before anything else touches CUDA.

    A rank that uses CUDA before set_device creates a context on GPU 0, which takes memory there.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"local rank {local_rank} has no GPU: {torch.cuda.device_count()} visible; "
            "start as many ranks as there are GPUs"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def identity(device: torch.device) -> str | None:
    """The UUID of a GPU; None for a CPU."""
    if device.type == "cpu":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def backend_for(asked: Backend, device: torch.device) -> str:
    """NCCL for CUDA tensors; gloo for CPU tensors."""
    if device.type == "cpu" or asked == "gloo":
        return "gloo"
    return "cpu:gloo,cuda:nccl"


def join(
    rank: int,
    local_rank: int,
    layout: Layout,
    backend: Backend,
    timeout_s: float,
    store: Any = None,
    local_world: int = 0,
) -> Mesh:
    """init_process_group; fails if a rank does not join within `timeout_s`. By default all ranks are on
    this machine."""
    device = bind_device(local_rank)
    limit = datetime.timedelta(seconds=timeout_s)
    if store is None and layout.world == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(
        backend_for(backend, device), rank=rank, world_size=layout.world, timeout=limit, store=store
    )
    background = dist.new_group(backend="gloo", timeout=limit)
    axes = _axes(layout, device, limit)
    here = local_world or layout.world
    return Mesh(rank, local_rank, layout, device, background, axes, limit, here)


@cache
def _axes(layout: Layout, device: torch.device, limit: datetime.timedelta) -> DeviceMesh | None:
    """Process groups along every axis, cached by layout since they are never destroyed."""
    if layout.only_replicas or layout.zero:
        return None
    sizes = tuple(layout.sizes[axis] for axis in AXES)
    axes = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    for axis in AXES:  # init_device_mesh uses the default timeout
        _set_pg_timeout(limit, axes[axis].get_group())
    return axes


def leave() -> None:
    """Destroy the process group. The pause lets gloo's threads free their last tensors, which takes the
    GIL: destroy_process_group would wait for them while holding it, a deadlock."""
    if dist.is_initialized():
        time.sleep(0.05)
        dist.destroy_process_group()
