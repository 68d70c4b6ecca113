"""Pipeline parallelism: each rank holds some layers, and micro-batches pass through the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
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

from muster.data.loader import IGNORE, Batch, Inputs
from muster.models.plan import ParallelPlan
from muster.models.whisper.search import Search
from muster.parallel.engine import StepFunctions, TorchEngine, full_tensor
from muster.parallel.gradients import redistributed_gradient
from muster.parallel.mesh import Mesh
from muster.parallel.staged_search import staged_search
from muster.parallel.stages import MANY_STAGES, cut_evenly
from muster.recipe.distributed import PipelineOptions

SCHEDULES_KEPT = 4
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}


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
        super().__init__(parts[0], parts, optimizer, mesh, split_loss=split_loss)
        assert mesh.axes is not None
        self.options, self.width = options, plan.width
        self.sequence_shards = (
            mesh.layout.tensor if sequence_parallel else 1
        )  # of the residual stream
        self.group = mesh.axes["pipeline"].get_group()
        self.ranks = mesh.layout.pipeline
        self.rank = mesh.layout.pipeline_rank(mesh.rank)
        self.stages = self.ranks * len(parts)
        self._schedules: dict[tuple[Any, ...], Any] = {}  # the last used ones
        self._current: list[Batch] = []
        self._functions: StepFunctions | None = None
        self.cuts = cut_evenly(plan.costs, self.stages)
        self._tie(plan)

    def _tie(self, plan: ParallelPlan) -> None:
        """The stage that embeds tokens and the last one hold the tied embedding: its gradient is the sum
        of both. With several stages on each rank, one rank may hold both."""
        self._tied_group: Any = None
        embedding = self.stage_of(plan.embeds)
        if plan.tied is None or embedding == self.stages - 1:
            return
        owner, last = embedding % self.ranks, self.ranks - 1
        assert self.mesh.axes is not None
        columns = self.mesh.axes.mesh.flatten(1)
        if owner != last:
            for pair in zip(columns[owner].tolist(), columns[last].tolist(), strict=True):
                group = dist.new_group(list(pair), timeout=self.mesh.limit)
                if self.mesh.rank in pair:
                    self._tied_group = group
        self.tied = [p for part in self.parts for n, p in part.named_parameters() if n == plan.tied]

    def stage_of(self, layer: int) -> int:
        return next(i for i, (start, stop) in enumerate(self.cuts) if start <= layer < stop)

    def load_state(self, loaded: dict[str, Any]) -> None:
        """Where this rank holds the tied embedding twice, the last was loaded."""
        super().load_state(loaded)
        for copy in self.tied[:-1]:
            with torch.no_grad():
                copy.copy_(self.tied[-1])
            held = self.optimizer.state
            for slot, tensor in held[copy].items():
                tensor.copy_(held[self.tied[-1]][slot])

    def accumulate(self, batches: Sequence[Batch], functions: StepFunctions) -> list[Tensor]:
        rows = max(len(batch.ids) for batch in batches)
        self._current = equal_shapes([functions.prepare(batch.padded(rows)) for batch in batches])
        self._functions = functions
        inputs = [functions.inputs(batch) for batch in self._current]
        args = [torch.cat(values) for values in zip(*(c.args for c in inputs), strict=True)]
        shared = {k: torch.cat([c.shared[k] for c in inputs]) for k in inputs[0].shared}
        losses: list[Tensor] = []
        index = torch.arange(len(batches), device="cpu")  # read on the host, without waiting
        shapes = tuple(tuple(x.shape) for x in (*args, *shared.values()))
        with functions.autocast(), self._loss_context():
            self._schedule(len(batches), shapes).step(
                *(args if self.rank == 0 else ()),
                target=index if self._is_last else None,
                losses=losses if self._is_last else None,
                return_outputs=False,
                **shared,
            )
        self._sum_tied()
        return [full_tensor(loss.detach()) / functions.scale for loss in losses]

    def _sum_tied(self) -> None:
        gradients: list[Any] = [
            redistributed_gradient(p).to_local() if isinstance(p, DTensor) else p.grad
            for p in self.tied
        ]
        for gradient in gradients[:-1]:
            gradients[-1].add_(gradient)
        if self._tied_group is not None:
            dist.all_reduce(gradients[-1], group=self._tied_group)
        for gradient in gradients[:-1]:
            gradient.copy_(gradients[-1])

    @property
    def _is_last(self) -> bool:
        return self.rank == self.ranks - 1

    def _schedule(self, count: int, shapes: tuple[tuple[int, ...], ...]) -> Any:
        """One schedule per shapes, since buffers between stages have a fixed shape; of few shapes, since
        each keeps its buffers. All ranks of a pipeline see the same shapes."""
        key = (count, *shapes)
        if key in self._schedules:
            self._schedules[key] = self._schedules.pop(key)  # the last to go
        else:
            while len(self._schedules) >= SCHEDULES_KEPT:
                del self._schedules[next(iter(self._schedules))]
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
            self._schedules[key] = kind(
                stages if self.options.schedule in MANY_STAGES else stages[0],
                n_microbatches=count,
                loss_fn=self._loss,
                scale_grads=False,
            )
        return self._schedules[key]

    def _loss(self, output: Any, index: Tensor) -> Tensor:
        assert self._functions is not None
        return self._functions.loss(output, self._current[int(index)]) * self._functions.scale

    def forward(self, inputs: Inputs) -> Any:
        """One batch through all stages, for evaluation; the last rank returns the output. A search for
        tokens runs on all ranks."""
        if isinstance(inputs.args[-1], Search):
            return staged_search(self, *inputs.args)
        (x,) = inputs.args
        rows, time = x.shape
        x = self.run_stages(
            range(self.stages), x, (rows, time // self.sequence_shards), inputs.shared
        )
        return full_tensor(x) if self._is_last else None

    def run_stages(
        self, stages: range, x: Any, shape: tuple[int, int], shared: dict[str, Any]
    ) -> Any:
        """`x` through these stages; what passes from one to the next is [*shape, width]. Returns the
        output on the rank of the last of them."""
        for stage in stages:
            owner, local = stage % self.ranks, stage // self.ranks
            if owner == self.rank:
                if stage > stages.start:
                    x = torch.empty(*shape, self.width, device=self.mesh.device)
                    dist.recv(x, group=self.group, group_src=(stage - 1) % self.ranks)
                x = self.parts[local](x, **shared)
                if stage < stages.stop - 1:
                    first = x[0] if isinstance(x, tuple) else x
                    dist.send(
                        first.float().contiguous(),
                        group=self.group,
                        group_dst=(stage + 1) % self.ranks,
                    )
        return x


def equal_shapes(batches: Sequence[Batch]) -> list[Batch]:
    """Micro-batches padded to one shape, with ignored targets: texts may be longer in one of them than
    in another."""
    largest = {
        name: [max(sizes) for sizes in zip(*(b[name].shape for b in batches), strict=True)]
        for name in batches[0].tensors
    }
    return [b.adding(**{n: _padded(n, b[n], size) for n, size in largest.items()}) for b in batches]


def _padded(name: str, tensor: Tensor, shape: Sequence[int]) -> Tensor:
    missing = [want - have for want, have in zip(shape, tensor.shape, strict=True)]
    if not any(missing):
        return tensor
    ends = [n for size in reversed(missing) for n in (0, size)]
    return F.pad(tensor, ends, value=IGNORE if name == "targets" else 0)
