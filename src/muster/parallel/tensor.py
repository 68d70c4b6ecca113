"""Tensor parallelism: each rank holds a shard of every matrix and the ranks share one batch.

A model's plan names how each layer is sharded; here the names become torch's ParallelStyles. With
sequence parallelism the residual stream is sharded along the sequence, in models whose plan allows it.
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


def split(
    model: nn.Module,
    axis: DeviceMesh,
    plan: ParallelPlan,
    options: TensorOptions,
    *,
    stage: bool = False,
) -> None:
    """In place, by the plan. A pattern of the plan that matches no layer is an error, except in a
    `stage` of a pipeline, which holds only some of the model."""
    names = [name for name, _ in model.named_modules()]
    styles: dict[str, ParallelStyle] = {}
    for pattern, how in plan.tensor.items():
        if not fnmatch.filter(names, pattern):
            if stage:
                continue
            raise ValueError(f"the tensor plan's {pattern!r} matches no layer of the model")
        style = _style(how, plan, options, axis.size())
        if style is not None:
            styles[pattern] = style
    parallelize_module(model, axis, styles)


def shards_sequence(plan: ParallelPlan, options: TensorOptions) -> bool:
    return options.sequence_parallel and plan.shards_sequence


def _style(
    how: Split, plan: ParallelPlan, options: TensorOptions, size: int
) -> ParallelStyle | None:
    sequence = shards_sequence(plan, options)
    stream: Placement = Shard(1) if sequence else Replicate()
    logits = Shard(-1) if options.loss_parallel else Replicate()
    match how:
        case "embedding":
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        case "scatter" if sequence:
            return PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        case "norm" if sequence:
            return SequenceParallel()
        case "head-norm":  # whose gradient is a sum over the heads of all ranks
            return SequenceParallel(sequence_dim=1, use_local_output=True)
        case "gather":
            return _Gather(stream)
        case "gather-both":
            return _Gather(stream, inputs=2)
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
    """All-gathers the module's first inputs, once for all layers inside."""

    def __init__(self, stream: Placement, inputs: int = 1) -> None:
        self.stream, self.inputs = stream, inputs

    def _apply(self, module: nn.Module, axis: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            whole = (gathered(x, axis, self.stream) for x in args[: self.inputs])
            return (*whole, *args[self.inputs :])

        module.register_forward_pre_hook(gather)
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
