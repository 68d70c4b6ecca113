"""Tensor parallelism: each rank holds a piece of every matrix and the ranks share one batch.

A model's plan says in plain words how each layer is cut; here the words become torch's styles. With
sequence parallelism the residual stream between the cut matrices is itself cut along the sequence.
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
    """In place, as the plan says. A line of the plan that touches nothing it should is an error."""
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
            # Pieces of unequal size must stay wrapped: torch would take them for equal ones.
            return ColwiseParallel(use_local_output=plan.hidden % size == 0)
        case "row":
            return RowwiseParallel(output_layouts=stream)
        case "head" | "tied-head":
            return _Head(stream, logits, cut=how == "head")
        case _:
            return None


class _Gather(ParallelStyle):
    """The module's first input, from the stream to whole, once for all layers inside."""

    def __init__(self, stream: Placement) -> None:
        self.stream = stream

    def _apply(self, module: nn.Module, axis: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(
            lambda _, args: (gathered(args[0], axis, self.stream), *args[1:])
        )
        return module


class _Head(ParallelStyle):
    """Logits of each rank's part of the vocabulary; left in pieces, or put together."""

    def __init__(self, stream: Placement, logits: Placement, cut: bool) -> None:
        self.stream, self.logits, self.cut = stream, logits, cut

    def _apply(self, module: nn.Module, axis: DeviceMesh) -> nn.Module:
        if self.cut:
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
