"""Memory and step time of one choice of settings for a recipe on a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from muster.parallel.conflicts import no_graphs
from muster.parallel.graphs import GRAPH_MEMORY
from muster.parallel.layout import Layout, strategy_name
from muster.parallel.stages import stages_per_rank
from muster.planner.collector import collector_paused
from muster.planner.compiled import Compiler, import_compiler
from muster.planner.kernels import Speeds
from muster.planner.memory import GIB, MARGIN, Choice, MemoryEstimate, Offload, estimate_memory
from muster.planner.profile import (
    MORE,
    ExecutionMode,
    ModelCost,
    Profile,
    ProfileRecorder,
    SplitAxes,
    Traces,
)
from muster.planner.recordings import Recordings, recording_key
from muster.planner.second_process import SecondProcess
from muster.planner.shards import Stage, stages
from muster.planner.subject import Subject, blocks_of
from muster.planner.time import (
    Cluster,
    Duration,
    MicroBatchTime,
    micro_batch_time,
    replayed,
    step_time,
)


@dataclass(frozen=True)
class Plan:
    """One choice of settings with its predicted memory and step time."""

    choice: Choice
    estimates: tuple[MemoryEstimate, ...]  # by pipeline stage
    duration: Duration
    samples: int  # per step

    @property
    def memory(self) -> MemoryEstimate:
        """Of the rank that needs most."""
        return max(self.estimates, key=lambda n: n.total)

    @property
    def strategy(self) -> str:
        return strategy_name(self.choice.layout)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.duration.total


@contextlib.contextmanager
def split_axes(tensor: int, context: int = 1) -> Iterator[SplitAxes]:
    """Fake process groups with this process as rank 0; in a run, beside its own groups."""
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("fake", rank=0, world_size=tensor * context)
    sizes = ((tensor, 1), (context, tensor))  # and how far apart their ranks are
    made = [_fake_group(range(0, size * step, step)) if size > 1 else None for size, step in sizes]
    tensors, contexts = made
    axis = tensors and DeviceMesh.from_group(tensors, "cpu", mesh_dim_names=("tensor",))
    try:
        yield SplitAxes(axis, contexts)
    finally:
        if alone:
            dist.destroy_process_group()
        else:
            for group in filter(None, made):
                dist.destroy_process_group(group)


def _fake_group(ranks: Sequence[int]) -> Any:
    """Local: the other ranks do not take part."""
    return dist.new_group(list(ranks), backend="fake", use_local_synchronization=True)


@dataclass
class Planner:
    """Evaluates choices for one recipe on one cluster. Recordings are made lazily and cached."""

    subject: Subject
    cluster: Cluster
    precision: str
    measure_loading: bool = False  # of data, on this machine
    recordings: Recordings | None = None  # of earlier plans
    second: SecondProcess | None = None  # that makes the second half of recordings
    _profiles: dict[tuple[ExecutionMode, bool], Profile] = field(default_factory=dict)
    _workloads: dict[Any, ModelCost] = field(default_factory=dict)
    _stages: dict[Any, list[Stage]] = field(default_factory=dict)
    _compiler: Compiler = field(default_factory=Compiler)
    _micro_batch_times: dict[Any, MicroBatchTime] = field(default_factory=dict)
    _savings: dict[ExecutionMode, float] = field(default_factory=dict)

    def on(self, cluster: Cluster) -> Planner:
        """The same recordings for another cluster."""
        return replace(self, cluster=cluster, _micro_batch_times={})

    def evaluate(self, choice: Choice) -> Plan:
        mode, stages = self._mode(choice), self.stages(choice.layout)
        estimates = self._memory(choice, mode)
        times = []
        for stage in stages:
            usual = self._workload(mode, stage, choice.rows, costliest=False)
            times.append(self._micro_batch_time(usual, stage.last, _context_stride(choice.layout)))
        if self._replayed(choice, max(memory.total for memory in estimates), times):
            uniform = self.subject.uniform
            estimates = self._memory(choice, mode, (choice.accumulation > 1) + (not uniform))
            times = [
                replayed(time, stage, self.cluster, choice.accumulation, uniform=uniform)
                for time, stage in zip(times, stages, strict=True)
            ]
        durations = [
            self._duration(choice, stage, time, self._fused(mode))
            for stage, time in zip(stages, times, strict=True)
        ]
        total = self.subject.recipe.training.global_batch_size
        return Plan(choice, tuple(estimates), max(durations, key=lambda d: d.total), total)

    def _memory(
        self, choice: Choice, mode: ExecutionMode, replayed: int | None = None
    ) -> list[MemoryEstimate]:
        """By stage."""
        return [
            estimate_memory(
                choice,
                stage,
                self._workload(mode, stage, choice.rows, costliest=True),
                cast=self.subject.plan.cast_weights,
                replayed=replayed,
            )
            for stage in self.stages(choice.layout)
        ]

    def duration_from_plain(self, choice: Choice) -> Duration:
        """Of a choice with activation checkpointing, from the recording without it."""
        mode = self._mode(replace(choice, checkpointing="none"))
        durations = []
        for stage in self.stages(choice.layout):
            plain = self._workload(mode, stage, choice.rows, costliest=False)
            mine = plain if stage.last else plain.of_blocks()
            mine = mine.with_recomputation(choice.checkpointing)
            time = micro_batch_time(mine, self.cluster, _context_stride(choice.layout))
            durations.append(self._duration(choice, stage, time, self._fused(mode)))
        return max(durations, key=lambda d: d.total)

    def _duration(
        self, choice: Choice, stage: Stage, micro_batch: MicroBatchTime, fused: float
    ) -> Duration:
        return step_time(
            choice,
            stage,
            micro_batch,
            self.cluster,
            rounded=self.subject.plan.cast_weights,
            loading=self._loading,
            fused=fused,
        )

    def _replayed(self, choice: Choice, memory: float, times: Sequence[MicroBatchTime]) -> bool:
        """Whether CUDA graphs would be used: asked for, or possible and faster, since the device waits for
        the host."""
        asked = self.subject.recipe.training.cuda_graphs
        if asked is False or choice.checkpointing != "none":
            return False
        captures = self.subject.task.facts.captures
        if no_graphs(self.subject.recipe, choice.layout, captures):
            return False
        return asked is True or (
            choice.layout.world == 1
            and memory <= GRAPH_MEMORY * self.capacity
            and all(time.host > time.matrices + time.memory for time in times)
        )

    def fits(self, plan: Plan) -> bool:
        return plan.memory.total <= (1 - MARGIN) * self.capacity

    @property
    def capacity(self) -> float:
        return self.cluster.device.memory_gib * GIB

    def shortfall(self, plan: Plan) -> str:
        part = plan.memory.largest
        return (
            f"needs {plan.memory.total / GIB:.1f} of {self.capacity / GIB:.1f} GiB even with "
            f"{choice_summary(plan.choice)}: {part} {plan.memory.parts[part] / GIB:.1f}"
        )

    def offload(self, layout: Layout) -> Offload:
        """As set in the recipe."""
        options = self.subject.recipe.distributed
        zero = options.deepspeed if layout.zero else None
        if zero is None:
            return "all" if options.fsdp.cpu_offload and layout.sharded else "none"
        if zero.offload_param != "none":
            return "all"
        return "optimizer" if zero.offload_optimizer != "none" else "none"

    def _mode(self, choice: Choice) -> ExecutionMode:
        rounded = choice.sharded or choice.layout.zero > 0
        return ExecutionMode(
            self.precision,
            choice.checkpointing,
            choice.compiled,
            rounded and self.precision != "fp32",
            choice.layout.tensor,
            choice.layout.context,
        )

    def _profile(self, mode: ExecutionMode, costliest: bool) -> Profile:
        key = (mode, costliest or self.subject.uniform)
        if key not in self._profiles:
            self._profiles[key] = self._saved_or_recorded(*key)
        return self._profiles[key]

    def _saved_or_recorded(self, mode: ExecutionMode, costliest: bool) -> Profile:
        if self.recordings is None:
            return self._record(mode, costliest)
        options = self.subject.recipe.distributed.tensor_options
        key = recording_key(self.subject, mode, costliest=costliest, options=options)
        profile = self.recordings.load(key)
        if profile is None:
            profile = self._record(mode, costliest)
            self.recordings.save(key, profile)
        return profile

    def _record(self, mode: ExecutionMode, costliest: bool) -> Profile:
        if self.second is None:
            with self._recorder(mode, costliest) as recorder:
                return recorder.profile()
        if mode.compiled:
            import_compiler()  # once, before the process is forked
        more = self.second.call(mode, costliest)
        with self._recorder(mode, costliest) as recorder:
            return recorder.profile(more)

    def traces_for_more(self, mode: ExecutionMode, costliest: bool) -> Traces:
        """The second half of a recording."""
        with self._recorder(mode, costliest) as recorder:
            return recorder.traces(MORE)

    @contextlib.contextmanager
    def _recorder(self, mode: ExecutionMode, costliest: bool) -> Iterator[ProfileRecorder]:
        options = self.subject.recipe.distributed.tensor_options
        alone = mode.tensor * mode.context == 1
        split = (
            contextlib.nullcontext(SplitAxes()) if alone else split_axes(mode.tensor, mode.context)
        )
        with collector_paused(), split as axes:
            yield ProfileRecorder(self.subject, mode, costliest, axes, options, self._compiler)

    def _micro_batch_time(
        self, workload: ModelCost, last: bool, context_stride: int
    ) -> MicroBatchTime:
        """Head and loss count for the last stage only."""
        key = (id(workload), last)
        if key not in self._micro_batch_times:
            mine = workload if last else workload.of_blocks()
            self._micro_batch_times[key] = micro_batch_time(mine, self.cluster, context_stride)
        return self._micro_batch_times[key]

    def _workload(
        self, mode: ExecutionMode, stage: Stage, rows: int, *, costliest: bool
    ) -> ModelCost:
        profile = self._profile(mode, costliest)
        depths = self._depths
        if not (stage.first and stage.last):
            depths = {stack: stage.depths.get(stack, 0) for stack in depths}
        key = (id(profile), tuple(depths.values()), rows)
        if key not in self._workloads:
            self._workloads[key] = profile.workload(depths, rows)
        return self._workloads[key]

    @cached_property
    def _depths(self) -> dict[str, int]:
        model, plan = self.subject.model, self.subject.plan
        return {name: len(blocks) for name, blocks in blocks_of(model, plan.blocks).items()}

    def stages(self, layout: Layout) -> list[Stage]:
        """What each pipeline rank holds."""
        options = self.subject.recipe.distributed.pipeline_options
        each = stages_per_rank(options) if layout.pipeline > 1 else 1
        key = (layout.tensor, layout.pipeline, each)
        if key not in self._stages:
            self._stages[key] = stages(self.subject, layout, per_rank=each)
        return self._stages[key]

    def _fused(self, mode: ExecutionMode) -> float:
        """Time of pointwise kernels when compiled, relative to eager. Tensor and context parallelism are
        recorded in eager mode; the ratio is taken from recordings without them."""
        if mode.tensor * mode.context == 1 or not mode.compiled:
            return 1.0
        if mode not in self._savings:
            speeds = Speeds.of(self.cluster.device)
            whole = replace(mode, tensor=1, context=1, checkpointing="none")
            seconds = [
                sum(
                    count * speeds.seconds(cost)
                    for cost, _, count in self._profile(kind, False).workload(self._depths, 2).ops
                    if cost.kind == "memory"
                )
                for kind in (whole, replace(whole, compiled=False))
            ]
            self._savings[mode] = seconds[0] / seconds[1]
        return self._savings[mode]

    @cached_property
    def _loading(self) -> float:
        """Of each rank's share of a step."""
        return self.subject.loading_seconds / self.cluster.world if self.measure_loading else 0.0


def _context_stride(layout: Layout) -> int:
    return layout.tensor if layout.context > 1 else 0


def choice_summary(choice: Choice) -> str:
    """One line of text."""
    parts = [f"micro-batch {choice.rows}"]
    if choice.accumulation > 1:
        parts.append(f"accumulation {choice.accumulation}")
    if choice.microbatches > 1:
        parts.append(f"{choice.microbatches} micro-batches in flight")
    if choice.checkpointing != "none":
        parts.append(f"{choice.checkpointing} checkpointing")
    if choice.offload != "none":
        parts.append("offload to the host")
    return ", ".join(parts)
