"""Fully sharded data parallel: each rank keeps a shard of every parameter, its gradient and its
optimizer state, and gathers one block's parameters at a time."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from muster.models.plan import ParallelPlan
from muster.parallel.blocks import find_blocks
from muster.parallel.dtypes import DTYPES
from muster.parallel.mesh import Mesh
from muster.recipe.distributed import FSDP


def data_axes(mesh: Mesh) -> DeviceMesh:
    """The ranks that see different data or tokens: shards alone, or copies of shards."""
    assert mesh.axes is not None
    return mesh.axes["replicate", "shard"] if mesh.layout.replicate > 1 else mesh.axes["shard"]


def shard(model: nn.Module, mesh: Mesh, plan: ParallelPlan, options: FSDP, precision: str) -> None:
    """In place. Where the model allows it, parameters are rounded to `precision` before they are
    gathered, which halves the traffic; gradients are always summed in float32."""
    axes = data_axes(mesh)
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES.get(precision) if plan.cast_weights else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    offload = (
        CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
        if options.cpu_offload
        else OffloadPolicy()
    )
    reshard = options.sharding == "full_shard"
    stage = mesh.layout.pipeline > 1
    blocks = find_blocks(model, options.wrap or plan.blocks, "distributed.fsdp.wrap", stage=stage)
    for block in blocks:
        fully_shard(
            block,
            mesh=axes,
            reshard_after_forward=reshard,
            mp_policy=policy,
            offload_policy=offload,
        )
    fully_shard(
        model, mesh=axes, reshard_after_forward=False, mp_policy=policy, offload_policy=offload
    )
    if options.forward_prefetch:
        for block, after in pairwise(blocks):
            if isinstance(block, FSDPModule) and isinstance(after, FSDPModule):
                block.set_modules_to_forward_prefetch([after])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _sum_gradients(module)
            if not options.backward_prefetch:
                module.set_modules_to_backward_prefetch([module])  # already there: nothing ahead


def _sum_gradients(module: FSDPModule) -> None:
    """The loss is already divided by the units of the whole global batch: gradients add up."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
