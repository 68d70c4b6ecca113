"""Distributed data parallel: every rank holds the model, gradients are summed."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from muster.parallel.mesh import Mesh
from muster.parallel.timing import Moment


class GradientClock:
    """When this rank had its last gradients ready: what follows until the backward pass returns is
    time spent on the others."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ready: Moment | None = None


def sum_gradients(
    clock: GradientClock,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """DDP's communication hook: sum, not average.

    The loss is already divided by the units of the whole global batch, so the gradients of the
    ranks add up to the gradient of that batch. DDP's own average would divide a second time.
    """
    clock.ready = Moment(clock.device)
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def replicate(
    model: nn.Module, mesh: Mesh, *, bucket_mb: float, find_unused_parameters: bool
) -> tuple[DistributedDataParallel, GradientClock]:
    on_gpu = mesh.device.type == "cuda"
    wrapped = DistributedDataParallel(
        model,
        device_ids=[mesh.device.index] if on_gpu else None,
        bucket_cap_mb=bucket_mb,
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=True,
    )
    clock = GradientClock(mesh.device)
    wrapped.register_comm_hook(clock, sum_gradients)
    return wrapped, clock
