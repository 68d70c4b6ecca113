"""Memory and step time of one choice of settings for a recipe on a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from muster.parallel.conflicts import no_graphs
from muster.parallel.graphs import GRAPH_MEMORY
from muster.parallel.layout import Layout, strategy_name
from muster.parallel.stages import stages_per_rank
from muster.plan.collector import collector_paused
from muster.plan.compiled import Compiler
from muster.plan.kernels import Speeds
from muster.plan.memory import GIB, MARGIN, Choice, MemoryEstimate, Offload, estimate_memory
from muster.plan.profile import ExecutionMode, ModelCost, Profile, record
from muster.plan.recordings import Recordings, recording_key
from muster.plan.shards import Stage, stages
from muster.plan.subject import Subject, blocks_of
from muster.plan.time import Cluster, Duration, MicroBatchTime, micro_batch_time, step_time


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
def tensor_ranks(count: int) -> Iterator[Any]:
    """A fake process group with this process as rank 0; in a run, beside its own groups."""
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=count)
        try:
            yield init_device_mesh("cpu", (count,), mesh_dim_names=("tensor",))
        finally:
            dist.destroy_process_group()
        return
    ranks = list(range(count))  # local: the other ranks do not take part
    group = dist.new_group(ranks, backend="fake", use_local_synchronization=True)
    try:
        yield DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tensor",))
    finally:
        dist.destroy_process_group(group)


@dataclass
class Planner:
    """Evaluates choices for one recipe on one cluster. Recordings are made lazily and cached."""

    subject: Subject
    cluster: Cluster
    precision: str
    measure_loading: bool = False  # of data, on this machine
    recordings: Recordings | None = None  # of earlier plans
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
        mode = self._mode(choice)
        estimates, durations = [], []
        for stage in self.stages(choice.layout):
            workload = self._workload(mode, stage, choice.rows, costliest=True)
            estimates.append(
                estimate_memory(choice, stage, workload, cast=self.subject.plan.cast_weights)
            )
        replayed = self._replayed(choice, max(memory.total for memory in estimates))
        for stage in self.stages(choice.layout):
            usual = self._workload(mode, stage, choice.rows, costliest=False)
            time = self._micro_batch_time(usual, stage.last)
            if replayed:
                time = replace(time, host=0.0)
            durations.append(self._duration(choice, stage, time, self._fused(mode)))
        total = self.subject.recipe.training.global_batch_size
        return Plan(choice, tuple(estimates), max(durations, key=lambda d: d.total), total)

    def duration_from_plain(self, choice: Choice) -> Duration:
        """Of a choice with activation checkpointing, from the recording without it."""
        mode = self._mode(replace(choice, checkpointing="none"))
        durations = []
        for stage in self.stages(choice.layout):
            plain = self._workload(mode, stage, choice.rows, costliest=False)
            mine = plain if stage.last else plain.of_blocks()
            time = micro_batch_time(mine.with_recomputation(choice.checkpointing), self.cluster)
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

    def _replayed(self, choice: Choice, memory: float) -> bool:
        """Whether CUDA graphs would be used where they pay."""
        asked = self.subject.recipe.training.cuda_graphs
        if asked is False or choice.checkpointing != "none":
            return False
        if no_graphs(self.subject.recipe, choice.layout):
            return False
        return asked is True or (
            choice.layout.world == 1 and memory <= GRAPH_MEMORY * self.capacity
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
            shards = layout.data_ranks > 1 and not layout.only_replicas
            return "all" if options.fsdp.cpu_offload and shards else "none"
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
        with collector_paused():
            if mode.tensor == 1:
                return record(self.subject, mode, costliest=costliest, compiler=self._compiler)
            options = self.subject.recipe.distributed.tensor_options
            with tensor_ranks(mode.tensor) as axis:
                return record(self.subject, mode, costliest=costliest, axis=axis, options=options)

    def _micro_batch_time(self, workload: ModelCost, last: bool) -> MicroBatchTime:
        """Head and loss count for the last stage only."""
        key = (id(workload), last)
        if key not in self._micro_batch_times:
            mine = workload if last else workload.of_blocks()
            self._micro_batch_times[key] = micro_batch_time(mine, self.cluster)
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
        """Time of pointwise kernels when compiled, relative to eager. Tensor parallelism is recorded in
        eager mode; the ratio is taken from recordings without it."""
        if mode.tensor == 1 or not mode.compiled:
            return 1.0
        if mode not in self._savings:
            speeds = Speeds.of(self.cluster.device)
            whole = replace(mode, tensor=1, checkpointing="none")
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
