"""Pipeline parallelism: each rank holds some layers, and micro-batches pass through the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from muster.data.loader import Batch, Inputs
from muster.errors import RecipeError
from muster.models.plan import ParallelPlan
from muster.parallel.engine import StepFunctions, TorchEngine, full_tensor
from muster.parallel.gradients import redistributed_gradient
from muster.parallel.mesh import Mesh
from muster.recipe.distributed import PipelineOptions

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}
MANY_STAGES = ("interleaved", "zero-bubble")


def check_schedule(options: PipelineOptions) -> None:
    """torch 2.11's split of the backward pass fails on a decoder's graph; 2.13's works."""
    if options.schedule == "zero-bubble" and torch.__version__ < (2, 13):  # type: ignore[operator]
        raise RecipeError(
            f"distributed.pipeline_options.schedule: zero-bubble needs torch 2.13, this is "
            f"{torch.__version__}; use 1f1b or interleaved"
        )


def stages_per_rank(options: PipelineOptions) -> int:
    many, asked = options.schedule in MANY_STAGES, options.stages_per_rank
    if not isinstance(asked, int):
        return 2 if many else 1
    if many != (asked > 1):
        raise RecipeError(
            f"distributed.pipeline_options.stages_per_rank: {asked}, but schedule {options.schedule} "
            f"needs {'2 or more' if many else 'exactly 1'}; use auto, or schedule "
            f"{' or '.join(s for s in SCHEDULES if (s in MANY_STAGES) != many)}"
        )
    return asked


def microbatches(options: PipelineOptions, pipeline: int, samples: int) -> int:
    """Micro-batches per schedule step: more make the bubble smaller, but each has fewer samples."""
    asked = options.microbatches
    if not isinstance(asked, int):
        return pipeline * max(1, min(4, samples // pipeline))
    few = asked < pipeline and options.schedule != "gpipe"
    odd = asked % pipeline and options.schedule in MANY_STAGES
    if few or odd:
        near = pipeline * max(1, round(asked / pipeline))
        raise RecipeError(
            f"distributed.pipeline_options.microbatches: schedule {options.schedule} on {pipeline} "
            f"pipeline ranks needs {'a multiple of' if odd else 'at least'} {pipeline}, not {asked}; "
            f"use {near}, or auto"
        )
    return asked


def cut_evenly(costs: Sequence[float], parts: int) -> list[tuple[int, int]]:
    """Contiguous layers in `parts` non-empty groups that minimize the cost of the most expensive."""
    best: dict[tuple[int, int], tuple[float, list[tuple[int, int]]]] = {(0, 0): (0.0, [])}
    for part in range(1, parts + 1):
        for stop in range(part, len(costs) - (parts - part) + 1):
            best[part, stop] = min(
                (
                    max(best[part - 1, start][0], sum(costs[start:stop])),
                    [*best[part - 1, start][1], (start, stop)],
                )
                for start in range(part - 1, stop)
                if (part - 1, start) in best
            )
    return best[parts, len(costs)][1]


def layer_costs(plan: ParallelPlan) -> list[float]:
    """Of each layer, in multiplications per token; the head belongs to the last."""
    costs = [float(plan.layer_cost)] * plan.layers
    costs[-1] += plan.head_cost
    return costs


class PipelineEngine(TorchEngine):
    """`parts` are this rank's stages: part i is stage `rank + i × pipeline ranks`."""

    def __init__(
        self,
        parts: list[nn.Module],
        optimizer: Optimizer,
        mesh: Mesh,
        plan: ParallelPlan,
        options: PipelineOptions,
        *,
        split_loss: bool,
        sequence_parallel: bool,
    ) -> None:
        super().__init__(parts[0], parts, optimizer, mesh.layout, split_loss=split_loss)
        assert mesh.axes is not None
        self.mesh, self.options, self.width = mesh, options, plan.width
        self.sequence_shards = (
            mesh.layout.tensor if sequence_parallel else 1
        )  # of the residual stream
        self.group = mesh.axes["pipeline"].get_group()
        self.ranks = mesh.layout.pipeline
        self.rank = mesh.layout.pipeline_rank(mesh.rank)
        self.stages = self.ranks * len(parts)
        self._schedules: dict[tuple[int, ...], Any] = {}
        self._current: list[Batch] = []
        self._functions: StepFunctions | None = None
        self._tie(plan.tied)

    def _tie(self, tied: bool) -> None:
        """First and last stage hold the tied embedding: its gradient is the sum of both."""
        self._tied_group: Any = None
        if not tied:
            return
        assert self.mesh.axes is not None
        columns = self.mesh.axes.mesh.flatten(1)
        for first, last in zip(columns[0].tolist(), columns[-1].tolist(), strict=True):
            group = dist.new_group([first, last], timeout=self.mesh.limit)
            if self.mesh.rank in (first, last):
                self._tied_group = group
        holder = self.parts[0] if self.rank == 0 else self.parts[-1]
        if self._tied_group is not None:
            self.tied = [p for n, p in holder.named_parameters() if n == "embed.tokens.weight"]

    def accumulate(self, batches: Sequence[Batch], functions: StepFunctions) -> list[Tensor]:
        rows = max(len(batch.ids) for batch in batches)
        self._current = [functions.prepare(batch.padded(rows)) for batch in batches]
        self._functions = functions
        inputs = [functions.inputs(batch) for batch in self._current]
        args = [torch.cat(values) for values in zip(*(c.args for c in inputs), strict=True)]
        shared = {k: torch.cat([c.shared[k] for c in inputs]) for k in inputs[0].shared}
        losses: list[Tensor] = []
        index = torch.arange(len(batches), device=self.mesh.device)
        with functions.autocast(), self._loss_context():
            self._schedule(len(batches), tuple(inputs[0].args[0].shape)).step(
                *(args if self.rank == 0 else ()),
                target=index if self._is_last else None,
                losses=losses if self._is_last else None,
                return_outputs=False,
                **shared,
            )
        if self.tied:
            (embedding,) = self.tied
            local = (
                redistributed_gradient(embedding).to_local()
                if isinstance(embedding, DTensor)
                else embedding.grad
            )
            dist.all_reduce(local, group=self._tied_group)
        return [full_tensor(loss.detach()) / functions.scale for loss in losses]

    @property
    def _is_last(self) -> bool:
        return self.rank == self.ranks - 1

    def _schedule(self, count: int, shape: tuple[int, ...]) -> Any:
        """One schedule per shape, since buffers between stages have a fixed shape."""
        if (count, *shape) not in self._schedules:
            stages = [
                PipelineStage(
                    part,
                    self.rank + i * self.ranks,
                    self.stages,
                    self.mesh.device,
                    group=self.group,
                )
                for i, part in enumerate(self.parts)
            ]
            kind = SCHEDULES[self.options.schedule]
            self._schedules[count, *shape] = kind(
                stages if self.options.schedule in MANY_STAGES else stages[0],
                n_microbatches=count,
                loss_fn=self._loss,
                scale_grads=False,
            )
        return self._schedules[count, *shape]

    def _loss(self, output: Any, index: Tensor) -> Tensor:
        assert self._functions is not None
        return self._functions.loss(output, self._current[int(index)]) * self._functions.scale

    def forward(self, inputs: Inputs) -> Any:
        """One batch through all stages, for evaluation; the last rank returns the output."""
        x: Any = inputs.args[0]
        rows, time = x.shape
        for stage in range(self.stages):
            owner, local = stage % self.ranks, stage // self.ranks
            if owner == self.rank:
                if stage > 0:
                    x = torch.empty(
                        rows, time // self.sequence_shards, self.width, device=self.mesh.device
                    )
                    dist.recv(x, group=self.group, group_src=(stage - 1) % self.ranks)
                x = self.parts[local](x, **inputs.shared)
                if stage < self.stages - 1:
                    dist.send(
                        x.float().contiguous(), group=self.group, group_dst=(stage + 1) % self.ranks
                    )
        return full_tensor(x) if self._is_last else None
