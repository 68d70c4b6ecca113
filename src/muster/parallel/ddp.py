"""DistributedDataParallel: every rank holds the model, gradients are summed."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from muster.parallel.mesh import Mesh
from muster.parallel.timestamps import DeviceTimestamp
from muster.recipe.distributed import DDP


class GradientClock:
    """When this rank's last bucket was ready: the rest of the backward pass is exposed communication."""

    def __init__(self, device: torch.device, dtype: torch.dtype | None) -> None:
        self.device, self.dtype = device, dtype
        self.ready: DeviceTimestamp | None = None

    def sum_now(self, gradients: Iterable[Tensor]) -> None:
        """Gradients summed over all ranks, after a backward pass without DDP's hook."""
        self.ready = DeviceTimestamp(self.device)
        parts = list(gradients)
        whole = torch.cat([part.flatten() for part in parts])
        sent = whole if self.dtype is None else whole.to(self.dtype)
        dist.all_reduce(sent)
        summed = sent.split([part.numel() for part in parts])
        torch._foreach_copy_(parts, [s.view_as(p) for s, p in zip(summed, parts, strict=True)])


def sum_gradients(
    clock: GradientClock,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """DDP's communication hook: sum, not average.

    The loss is already divided by the units of the whole global batch, so the gradients of the
    ranks add up to the gradient of that batch. DDP's own average would divide a second time.
    """
    clock.ready = DeviceTimestamp(clock.device)
    whole: Tensor = bucket.buffer()
    if clock.dtype is None:
        work = dist.all_reduce(whole, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])
    work = dist.all_reduce(whole.to(clock.dtype), async_op=True)
    return work.get_future().then(lambda done: whole.copy_(done.value()[0]))


def replicate(
    model: nn.Module, mesh: Mesh, options: DDP
) -> tuple[DistributedDataParallel, GradientClock]:
    on_gpu = mesh.device.type == "cuda"
    wrapped = DistributedDataParallel(
        model,
        device_ids=[mesh.device.index] if on_gpu else None,
        bucket_cap_mb=options.bucket_mb,
        find_unused_parameters=options.find_unused_parameters,
        static_graph=options.static_graph,
        gradient_as_bucket_view=True,
    )
    dtypes = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    clock = GradientClock(mesh.device, dtypes[options.compression])
    wrapped.register_comm_hook(clock, sum_gradients)
    return wrapped, clock
