"""The process group of a run, and its small collectives outside of gradients."""

from __future__ import annotations

import datetime
import os
import time
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from muster.errors import LaunchError
from muster.hardware import inventory, rehearsal
from muster.hardware.amd import NO_ROCM
from muster.hardware.inventory import Inventory
from muster.parallel.layout import Layout
from muster.torch_internals import _set_pg_timeout

Backend = Literal["auto", "nccl", "gloo"]

BACKGROUND_LIMIT = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Mesh:
    """One rank of the process group. `background` is a second group, for the checkpoint
    thread: two threads must never share one. `axes` has a group for each axis of the weights; DDP,
    ZeRO and a single process need none. `context` is the group that shares this rank's sequences."""

    rank: int
    local_rank: int
    layout: Layout
    device: torch.device
    background: Any
    axes: DeviceMesh | None = None
    limit: datetime.timedelta = datetime.timedelta(seconds=600)  # of every collective
    local_world: int = 1  # ranks on this machine
    ranks_per_gpu: int = 1  # more in a rehearsal
    context: Any = None

    @property
    def world(self) -> int:
        return self.layout.world

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def place(self) -> str:
        """This rank's device, for people."""
        host = os.uname().nodename
        return f"GPU {self.device.index} of {host}" if self.device.type == "cuda" else host

    @property
    def data_rank(self) -> int:
        return self.layout.data_rank(self.rank)

    @property
    def context_rank(self) -> int:
        return self.layout.context_rank(self.rank)

    @property
    def has_loss(self) -> bool:
        """Whether this rank's loss counts: it has the last layers. Context ranks have a part each."""
        last = self.layout.pipeline_rank(self.rank) == self.layout.pipeline - 1
        return last and self.layout.tensor_rank(self.rank) == 0

    @property
    def is_reporter(self) -> bool:
        """Whether this rank reports for those that share its data."""
        return self.has_loss and self.context_rank == 0

    def sum(self, *values: float, everyone: float = 0.0) -> list[float]:
        """Each value summed over the ranks that see different data, in float64, and after them
        `everyone`, summed over all ranks."""
        if self.world == 1:
            return [*values, everyone]
        packed = torch.tensor([v if self.is_reporter else 0.0 for v in values], dtype=torch.float64)
        packed = torch.cat([packed, torch.tensor([everyone], dtype=torch.float64)])
        dist.all_reduce(packed)
        return packed.tolist()

    def total(self, value: Tensor) -> Tensor:
        """A loss summed over the ranks that see different data or tokens, in float64 on their devices."""
        value = value.detach().double()
        if self.world == 1:
            return value
        summed = value.clone() if self.has_loss else torch.zeros_like(value)
        dist.all_reduce(summed)
        return summed

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

    def every_rank(self, value: Tensor) -> Tensor:
        """Whether `value`, a boolean on the device, is true on every rank."""
        agreed = value.int()
        if self.world > 1:
            dist.all_reduce(agreed, dist.ReduceOp.MIN)
        return agreed.bool()

    def barrier(self) -> None:
        if self.world > 1:
            self.sum()

    def with_layout(self, layout: Layout) -> Mesh:
        """The same ranks in another layout. A collective call."""
        layout.check_world(self.world)
        axes, context = _axes(layout, self.device, self.limit)
        return replace(self, layout=layout, axes=axes, context=context)


def bind_device(local_rank: int) -> torch.device:
    """This rank's device, made current before anything else touches CUDA.

    A rank that uses CUDA before set_device creates a context on GPU 0, which takes memory there. Where
    one GPU is visible, the launcher may have given each rank its own: two ranks that share one are
    refused when they register.
    """
    visible = torch.cuda.device_count()
    if not visible or not torch.cuda.is_available():
        refuse_unusable_gpus(inventory.detect())
        return torch.device("cpu")
    shared = visible == 1 or rehearsal.active()
    if local_rank >= visible and not shared:
        raise LaunchError(
            f"local rank {local_rank} has no GPU: {visible} visible; start as many ranks as there are "
            f"GPUs, or let ranks share them with {rehearsal.FLAG}"
        )
    device = torch.device("cuda", local_rank % visible)
    torch.cuda.set_device(device)
    return device


def refuse_unusable_gpus(found: Inventory) -> None:
    """GPUs that torch cannot use: training on the CPU beside them would be a surprise."""
    without_rocm = [gpu for gpu in found.hidden if gpu.by == NO_ROCM]
    if not found.gpus and not without_rocm:
        return
    if without_rocm:
        cause = f"AMD GPUs are here, but {NO_ROCM}"
        cure = "install the one from download.pytorch.org/whl/rocm… (see pytorch.org/get-started), or set"
    elif torch.version.cuda is None:
        cause = f"{found.describe()} are here, but torch {torch.__version__} is built without CUDA"
        cure = "install torch from PyPI (pip install --force-reinstall torch), or set"
    else:
        cause = f"{found.describe()} are here, but CUDA does not start: {_cuda_error()}"
        cure = "update the driver, start the container with --gpus all, or set"
    mask = "HIP_VISIBLE_DEVICES" if without_rocm else "CUDA_VISIBLE_DEVICES"
    raise LaunchError(f"{cause}; {cure} {mask}= (empty) to train on the CPU")


def _cuda_error() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().partition("\n")[0]
    return "torch.cuda.is_available() is false"


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
    device, ranks_per_gpu = bind_device(local_rank), 1
    if rehearsal.active():
        rehearsal.set_host_id(rank)
    limit = datetime.timedelta(seconds=timeout_s)
    if store is None and layout.world == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(
        backend_for(backend, device), rank=rank, world_size=layout.world, timeout=limit, store=store
    )
    # A rank may wait for another's slow storage as long as that one makes progress: see `StallWatch`.
    background = dist.new_group(backend="gloo", timeout=BACKGROUND_LIMIT)
    if rehearsal.active() and device.type == "cuda":
        ranks_per_gpu = _share_gpu(device, layout.world)
    axes, context = _axes(layout, device, limit)
    here = local_world or layout.world
    return Mesh(
        rank, local_rank, layout, device, background, axes, limit, here, ranks_per_gpu, context
    )


def _share_gpu(device: torch.device, world: int) -> int:
    """Limit this rank to its share of the GPU's memory; returns how many ranks share it."""
    everyone: list[Any] = [None] * world
    mine = identity(device)  # unique, in whichever container a rank is
    dist.all_gather_object(everyone, mine)
    total, ranks = torch.cuda.get_device_properties(device).total_memory, everyone.count(mine)
    torch.cuda.set_per_process_memory_fraction(rehearsal.share_of(total, ranks) / total, device)
    return ranks


@cache
def _axes(
    layout: Layout, device: torch.device, limit: datetime.timedelta
) -> tuple[DeviceMesh | None, Any]:
    """Process groups, cached by layout since they are never destroyed."""
    axes, context = make_axes(layout, device.type)
    groups = [] if context is None else [context]
    for axis in layout.weight_sizes if axes is not None else ():
        groups.append(axes[axis].get_group())  # type: ignore[index]
    for group in groups:  # init_device_mesh uses the default timeout
        _set_pg_timeout(limit, group)
    return axes, context


def make_axes(layout: Layout, kind: str) -> tuple[DeviceMesh | None, Any]:
    """The mesh of the weights, where there is one, and this rank's context group."""
    axes = context = None
    if layout.context > 1:
        others = layout.world // (layout.context * layout.tensor)
        shape = (others, layout.context, layout.tensor)
        every = init_device_mesh(kind, shape, mesh_dim_names=("others", "context", "tensor"))
        context = every["context"].get_group()
    if not (layout.only_replicas or layout.zero):
        sizes = layout.weight_sizes
        axes = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return axes, context


def leave() -> None:
    """Destroy the process group. The pause lets gloo's threads free their last tensors, which takes the
    GIL: destroy_process_group would wait for them while holding it, a deadlock."""
    if dist.is_initialized():
        time.sleep(0.05)
        dist.destroy_process_group()
