"""What one way to run a recipe on a cluster needs, and how long its steps take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from muster.parallel.layout import Layout, strategy_name
from muster.parallel.pipeline import stages_per_rank
from muster.plan.compiled import Compiler
from muster.plan.held import Stage, stages
from muster.plan.kernels import Speeds
from muster.plan.memory import GIB, MARGIN, Choice, Need, Offload, need
from muster.plan.profile import Load, Profile, Way, record
from muster.plan.subject import Subject, blocks_of
from muster.plan.time import Cluster, Duration, Tally, step_time, tally


@dataclass(frozen=True)
class Plan:
    """One way to run the recipe, weighed."""

    choice: Choice
    needs: tuple[Need, ...]  # by pipeline stage
    duration: Duration
    samples: int  # per step

    @property
    def need(self) -> Need:
        """Of the fullest rank."""
        return max(self.needs, key=lambda n: n.total)

    @property
    def strategy(self) -> str:
        return strategy_name(self.choice.layout)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.duration.total


@contextlib.contextmanager
def tensor_ranks(count: int) -> Iterator[Any]:
    """A row of fake ranks, of which this process is the first."""
    if dist.is_initialized():
        raise RuntimeError("tensor ranks are planned before the real ones meet")
    dist.init_process_group("fake", rank=0, world_size=count)
    try:
        yield init_device_mesh("cpu", (count,), mesh_dim_names=("tensor",))
    finally:
        dist.destroy_process_group()


@dataclass
class Planner:
    """Weighs ways to run one recipe on one cluster. Recordings are made when first needed."""

    subject: Subject
    cluster: Cluster
    precision: str
    here: bool = False  # this machine loads the data, so how long that takes can be measured
    _profiles: dict[tuple[Way, bool], Profile] = field(default_factory=dict)
    _loads: dict[Any, Load] = field(default_factory=dict)
    _stages: dict[Any, list[Stage]] = field(default_factory=dict)
    _compiler: Compiler = field(default_factory=Compiler)
    _tallies: dict[Any, Tally] = field(default_factory=dict)
    _savings: dict[Way, float] = field(default_factory=dict)

    def on(self, cluster: Cluster) -> Planner:
        """The same recordings for another cluster."""
        return replace(self, cluster=cluster)

    def weigh(self, choice: Choice) -> Plan:
        way = self._way(choice)
        found = self.stages(choice.layout)
        needs, slowest = [], None
        for stage in found:
            load = self._load(way, stage, choice.rows, costliest=True)
            needs.append(need(choice, stage, load, cast=self.subject.plan.cast_weights))
            usual = self._load(way, stage, choice.rows, costliest=False)
            duration = step_time(
                choice,
                stage,
                self._tally(usual, stage.last),
                self.cluster,
                rounded=self.subject.plan.cast_weights,
                loading=self._loading,
                fused=self._fused(way),
            )
            if slowest is None or duration.total > slowest.total:
                slowest = duration
        assert slowest is not None
        total = self.subject.recipe.training.global_batch_size
        return Plan(choice, tuple(needs), slowest, total)

    def fits(self, plan: Plan) -> bool:
        return plan.need.total <= (1 - MARGIN) * self.capacity

    @property
    def capacity(self) -> float:
        return self.cluster.device.memory_gib * GIB

    def too_much(self, plan: Plan) -> str:
        part = plan.need.largest
        return (
            f"needs {plan.need.total / GIB:.1f} of {self.capacity / GIB:.1f} GiB even with "
            f"{describe(plan.choice)}: {part} {plan.need.parts[part] / GIB:.1f}"
        )

    def offload(self, layout: Layout) -> Offload:
        """What the recipe says."""
        options = self.subject.recipe.distributed
        zero = options.deepspeed if layout.zero else None
        if zero is None:
            shards = layout.data_ranks > 1 and not layout.plain
            return "all" if options.fsdp.cpu_offload and shards else "none"
        if zero.offload_param != "none":
            return "all"
        return "optimizer" if zero.offload_optimizer != "none" else "none"

    def _way(self, choice: Choice) -> Way:
        rounded = choice.sharded or choice.layout.zero > 0
        return Way(
            self.precision,
            choice.checkpointing,
            choice.compiled,
            rounded and self.precision != "fp32",
            choice.layout.tensor,
        )

    def _profile(self, way: Way, costliest: bool) -> Profile:
        fixed = self.subject.recipe.task == "causal-lm" or self.subject.source is None
        key = (way, costliest or fixed)
        if key not in self._profiles:
            if way.tensor == 1:
                self._profiles[key] = record(
                    self.subject, way, costliest=key[1], compiler=self._compiler
                )
            else:
                options = self.subject.recipe.distributed.tensor_options
                with tensor_ranks(way.tensor) as axis:
                    self._profiles[key] = record(
                        self.subject, way, costliest=key[1], axis=axis, options=options
                    )
        return self._profiles[key]

    def _tally(self, load: Load, last: bool) -> Tally:
        """The head and the loss are the last stage's."""
        cluster = self.cluster
        key = (id(load), last, cluster.device.name, cluster.world, cluster.per_node)
        if key not in self._tallies:
            mine = load if last else load.of_blocks()
            self._tallies[key] = tally(mine, self.cluster)
        return self._tallies[key]

    def _load(self, way: Way, stage: Stage, rows: int, *, costliest: bool) -> Load:
        profile = self._profile(way, costliest)
        depths = dict(self._depths)
        if len(depths) == 1:
            depths = dict.fromkeys(depths, stage.layers)
        key = (id(profile), tuple(depths.values()), rows)
        if key not in self._loads:
            self._loads[key] = profile.load(depths, rows)
        return self._loads[key]

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

    def _fused(self, way: Way) -> float:
        """What compiling leaves of the time of small kernels. Split matrices are recorded as they are,
        uncompiled; what compiling saves is taken from the whole ones."""
        if way.tensor == 1 or not way.compiled:
            return 1.0
        if way not in self._savings:
            speeds = Speeds.of(self.cluster.device)
            whole = replace(way, tensor=1, checkpointing="none")
            seconds = [
                sum(
                    count * speeds.seconds(work)
                    for work, _, count in self._profile(kind, False).load(self._depths, 2).work
                    if work.kind == "memory"
                )
                for kind in (whole, replace(whole, compiled=False))
            ]
            self._savings[way] = seconds[0] / seconds[1]
        return self._savings[way]

    @cached_property
    def _loading(self) -> float:
        """Of each rank's share of a step."""
        return self.subject.loading_seconds / self.cluster.world if self.here else 0.0


def describe(choice: Choice) -> str:
    """In the words of the field."""
    parts = [f"micro-batch {choice.rows}"]
    if choice.accumulation > 1:
        parts.append(f"accumulation {choice.accumulation}")
    if choice.pieces > 1:
        parts.append(f"{choice.pieces} pieces in flight")
    if choice.checkpointing != "none":
        parts.append(f"{choice.checkpointing} checkpointing")
    if choice.offload != "none":
        parts.append("offload to the host")
    return ", ".join(parts)
