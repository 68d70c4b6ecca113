"""Tensor parallelism: each rank holds a shard of every matrix and the ranks share one batch.

A model's plan names how each layer is sharded; here the names become torch's ParallelStyles. With
sequence parallelism the residual stream is sharded along the sequence.
"""

from __future__ import annotations

import fnmatch
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from muster.models.plan import ParallelPlan, Split
from muster.recipe.distributed import TensorOptions


def split(model: nn.Module, axis: DeviceMesh, plan: ParallelPlan, options: TensorOptions) -> None:
    """In place, by the plan. A pattern of the plan that matches no layer is an error."""
    names = [name for name, _ in model.named_modules()]
    children = {name for name, _ in model.named_children()}
    styles: dict[str, ParallelStyle] = {}
    for pattern, how in plan.tensor.items():
        if pattern.split(".")[0] not in children:  # a pipeline stage holds only some of the model
            continue
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"the tensor plan's {pattern!r} matches no layer of the model")
        style = _style(how, plan, options, axis.size())
        if style is not None:
            styles[pattern] = style
    parallelize_module(model, axis, styles)


def _style(
    how: Split, plan: ParallelPlan, options: TensorOptions, size: int
) -> ParallelStyle | None:
    stream: Placement = Shard(1) if options.sequence_parallel else Replicate()
    logits = Shard(-1) if options.loss_parallel else Replicate()
    match how:
        case "embedding":
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        case "scatter" if options.sequence_parallel:
            return PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        case "norm" if options.sequence_parallel:
            return SequenceParallel()
        case "gather":
            return _Gather(stream)
        case "heads":
            return ColwiseParallel()
        case "column":
            # Shards of unequal size must stay DTensors: torch would assume equal ones.
            return ColwiseParallel(use_local_output=plan.hidden % size == 0)
        case "row":
            return RowwiseParallel(output_layouts=stream)
        case "head" | "tied-head":
            return _Head(stream, logits, sharded=how == "head")
        case _:
            return None


class _Gather(ParallelStyle):
    """All-gathers the module's first input, once for all layers inside."""

    def __init__(self, stream: Placement) -> None:
        self.stream = stream

    def _apply(self, module: nn.Module, axis: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(
            lambda _, args: (gathered(args[0], axis, self.stream), *args[1:])
        )
        return module


class _Head(ParallelStyle):
    """Logits of each rank's shard of the vocabulary; left sharded, or gathered."""

    def __init__(self, stream: Placement, logits: Placement, sharded: bool) -> None:
        self.stream, self.logits, self.sharded = stream, logits, sharded

    def _apply(self, module: nn.Module, axis: DeviceMesh) -> nn.Module:
        if self.sharded:
            module = ColwiseParallel(
                input_layouts=self.stream, output_layouts=Shard(-1), use_local_output=False
            )._apply(module, axis)
        else:
            _Gather(self.stream)._apply(module, axis)
        module.register_forward_hook(lambda _, args, output: self._finish(output))
        return module

    def _finish(self, output: DTensor) -> Tensor:
        if self.logits.is_replicate():
            return output.redistribute(placements=[Replicate()]).to_local()
        return output


def gathered(x: Any, axis: DeviceMesh, stream: Placement) -> DTensor:
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, axis, [stream], run_check=False)
    return x.redistribute(placements=[Replicate()])
