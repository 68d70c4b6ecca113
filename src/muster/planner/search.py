"""Finds the fastest layout that fits, and why the others were rejected."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from muster.errors import RecipeError
from muster.models.norm import MaskedBatchNorm
from muster.observe.progress import Report, silent
from muster.parallel import float8
from muster.parallel.blocks import Checkpointing
from muster.parallel.conflicts import refuse_conflicts, refuse_tensor_conflicts
from muster.parallel.layout import Layout, layout_for, strategy_name
from muster.parallel.optimizers.facts import ZERO_OPTIMIZERS
from muster.parallel.stages import check_schedule
from muster.planner.memory import GIB, Choice
from muster.planner.optimizer import OptimizerChoice
from muster.planner.planner import Plan, Planner
from muster.recipe.batch import BatchSizes, micro_batches, solve
from muster.recipe.schema import Recipe

TIE = 0.08  # of a step, the planner's error: closer strategies count as equally fast
BY_COMPLEXITY = (
    "single",
    "ddp",
    "fsdp",
    "hsdp",
    "zero1",
    "zero2",
    "zero3",
    "tensor",
    "pipeline",
    "context",
    "hybrid",
)
CHECKPOINTING_MODES: tuple[Checkpointing, ...] = ("none", "selective", "full")
UNRECORDED = 0.02  # error of a step time with checkpointing that was not recorded with it
ADAPTERS = "adapters train under ddp, fsdp and hsdp"


@dataclass(frozen=True)
class SearchResult:
    """The result of a search. `rejected`: the reason, by strategy."""

    plans: list[Plan]  # that fit, best first
    rejected: dict[str, str]
    closest: Plan | None  # the one that needs least, where none fits

    @property
    def best(self) -> Plan | None:
        return self.plans[0] if self.plans else None


def search(planner: Planner, *, thorough: bool = True, tell: Report = silent) -> SearchResult:
    """`thorough`: also tensor and pipeline ranks, other activation checkpointing, and offload. `tell` is
    called with the layouts that were looked at, of those that are known so far."""
    return _Search(planner, thorough, tell).run()


@dataclass
class _Search:
    planner: Planner
    thorough: bool
    tell: Report = silent
    fitting: list[Plan] = field(default_factory=list)
    closest: dict[str, Plan] = field(default_factory=dict)  # by strategy: what needs least
    rejected: dict[str, str] = field(default_factory=dict)
    conflict: RecipeError | None = None  # of the first layout that the recipe's settings exclude
    infeasible: bool = False  # some layout, without being evaluated
    looked_at: int = 0

    def run(self) -> SearchResult:
        self._evaluate(self._layouts())
        if self.thorough and self.recipe.distributed.strategy == "auto":
            saving = self._possible_saving()
            if saving is not None and saving <= TIE / (1 + TIE):
                self.rejected["tensor, pipeline, hybrid"] = (
                    f"could save at most {100 * saving:.1f} % of a step, which communication, "
                    "recomputation and the optimizer take now"
                )
            else:
                self._evaluate(self._split_layouts())
        if not self.fitting and self.thorough:
            self._evaluate(self._layouts(), offload=True)
        if self.conflict and not (self.fitting or self.closest or self.infeasible):
            raise self.conflict  # memory is not what is in the way
        good = {plan.strategy for plan in self.fitting}
        for name, plan in self.closest.items():
            self.rejected[name] = self.planner.shortfall(plan)
        least = min(self.closest.values(), key=lambda plan: plan.memory.total, default=None)
        rejected = {name: why for name, why in self.rejected.items() if name not in good}
        return SearchResult(rank(self.fitting), rejected, least)

    @property
    def recipe(self) -> Recipe:
        return self.planner.subject.recipe

    @property
    def world(self) -> int:
        return self.planner.cluster.world

    def _evaluate(self, layouts: Iterable[Layout], offload: bool = False) -> None:
        several = list(layouts)
        known = self.looked_at + len(several)
        for layout in several:
            self.tell(self.looked_at, known)
            self.looked_at += 1
            name = strategy_name(layout)
            if (reason := self._infeasible(layout, offload)) is not None:
                self.rejected.setdefault(name, reason)
                self.infeasible = True
                continue
            fastest = math.inf  # of this layout
            fitting: set[Choice] = set()
            for choice in self._allowed(layout, offload):
                if _fits_without(choice, fitting):
                    continue  # recomputation saves no time
                if self._least_time(choice) >= fastest:
                    continue
                plan = self.planner.evaluate(choice)
                before = self.closest.get(name)
                if self.planner.fits(plan):
                    self.fitting.append(plan)
                    fitting.add(choice)
                    fastest = min(fastest, plan.duration.total)
                elif before is None or plan.memory.total < before.memory.total:
                    self.closest[name] = plan

    def _least_time(self, choice: Choice) -> float:
        """Of a step with checkpointing, before that is recorded, which takes seconds."""
        if choice.checkpointing == self.recipe.training.activation_checkpointing:
            return 0.0
        return (1 - UNRECORDED) * self.planner.duration_from_plain(choice).total

    def _allowed(self, layout: Layout, offload: bool) -> Iterator[Choice]:
        """Rejects what `muster train` would refuse, with its message; raises it where the recipe names the
        strategy and nothing is left."""
        refused: RecipeError | None = None
        left = False
        try:
            for choice in self._choices(layout, offload):
                try:
                    self._refuse_conflicts(choice)
                except RecipeError as error:
                    refused = refused or error
                else:
                    left = True
                    yield choice
        except RecipeError as error:  # batch sizes that this layout cannot have
            refused = error
        if refused is None or left:
            return
        if self.recipe.distributed.strategy != "auto":
            raise refused
        self.conflict = self.conflict or refused
        self.rejected.setdefault(strategy_name(layout), str(refused))

    def _refuse_conflicts(self, choice: Choice) -> None:
        checkpointing: Any = choice.checkpointing
        training = self.recipe.training.model_copy(
            update={
                "activation_checkpointing": checkpointing,
                "gradient_accumulation_steps": choice.accumulation,
            }
        )
        recipe = self.recipe.model_copy(update={"training": training})
        refuse_conflicts(recipe, choice.layout)
        refuse_tensor_conflicts(recipe, choice.layout, self.planner.subject.plan)
        if training.precision == "fp8":
            subject, gathered = self.planner.subject, choice.sharded and choice.offload == "none"
            float8.choose(subject.model, subject.plan, choice.layout.shards if gathered else 1)

    def _infeasible(self, layout: Layout, offload: bool) -> str | None:
        """Why this layout cannot run, as far as no recording is needed."""
        total, capacity = self.recipe.training.global_batch_size, self.planner.capacity
        if total < layout.data_ranks:
            return f"global batch of {total} samples is smaller than the {layout.data_ranks} data ranks"
        if offload or self.planner.offload(layout) != "none":
            return None
        shards = layout.shards
        trained = max(stage.trained / shards for stage in self.planner.stages(layout))
        kept = OptimizerChoice.of(self.recipe.training).least_bytes
        least = (8 + kept) * trained
        if layout.zero in (1, 2):
            least = (4 + kept) * trained + 2 * self.planner.subject.parameters
        if least <= capacity:
            return None
        return (
            f"needs {least / GIB:.0f} of {capacity / GIB:.1f} GiB for weights, gradients and the "
            "optimizer alone"
        )

    def _possible_saving(self) -> float | None:
        """The fraction of the fastest step that is neither computation without recomputation nor launching
        its kernels once: no layout of the same devices saves more. None where nothing fits."""
        best = min(self.fitting, key=lambda plan: plan.duration.total, default=None)
        if best is None:
            return None
        base = self.planner.evaluate(replace(best.choice, checkpointing="none")).duration
        computing, passes = base.matrices + base.memory, best.choice.accumulation
        launching = (computing + base.host) / passes
        return 1 - max(computing, launching) / best.duration.total

    def _layouts(self) -> Iterator[Layout]:
        """The recipe's strategy, or all that do not split the model's layers."""
        recipe, world, inner = self.recipe, self.world, self.planner.cluster.per_node
        if recipe.distributed.strategy != "auto":
            layout = layout_for(recipe.distributed, world, local_world=inner)
            plan, options = self.planner.subject.plan, recipe.distributed.pipeline_options
            layout.check_model(plan, self.name)
            if layout.pipeline > 1:
                check_schedule(options, plan)
            yield layout
            return
        if world == 1:
            yield Layout()
            return
        names = ["ddp", "fsdp"]
        if world > inner and world % inner == 0 and inner % self.context == 0:
            names.append("hsdp")
        for strategy in names:
            layout = layout_for(recipe.distributed, world, strategy, inner)
            layout.check_model(self.planner.subject.plan, self.name)
            yield layout
        if self.context > 1:
            self.rejected["zero1, zero2, zero3"] = "ZeRO multiplies with no context ranks"
        elif recipe.model.lora is not None:
            self.rejected["zero1, zero2, zero3"] = ADAPTERS
        elif recipe.training.optimizer not in ZERO_OPTIMIZERS:
            self.rejected["zero1, zero2, zero3"] = (
                f"{recipe.training.optimizer} needs whole matrices"
            )
        elif self.thorough or find_spec("deepspeed"):
            yield from (Layout(shard=world, zero=stage) for stage in (1, 2, 3))

    @property
    def context(self) -> int:
        """As the recipe has it: what it costs to gather keys and values pays where nothing else fits."""
        asked = self.recipe.distributed.context
        return asked if isinstance(asked, int) else 1

    @property
    def name(self) -> str:
        return self.recipe.model.title

    def _split_layouts(self) -> Iterator[Layout]:
        """Those that split the model; tensor ranks stay within a node."""
        inner = self.planner.cluster.per_node
        if self.recipe.model.lora is not None:
            self.rejected["tensor, pipeline"] = ADAPTERS
            return
        for tensor in _powers(self.world // self.context):
            if tensor > inner:
                self.rejected[f"tensor {tensor}"] = (
                    f"spans nodes of {inner} GPUs: every layer would wait for the network"
                )
                break
            rest = self.world // (tensor * self.context)
            for pipeline in _powers(rest) if self.context == 1 else [1]:
                over = rest // pipeline
                one_copy = over == 1 and self.world > inner  # many nodes, and nothing is sharded
                if tensor * pipeline > 1 and not one_copy:
                    yield from self._if_possible(
                        Layout(shard=over, tensor=tensor, pipeline=pipeline, context=self.context)
                    )

    def _if_possible(self, layout: Layout) -> Iterator[Layout]:
        try:
            layout.check_model(self.planner.subject.plan, self.name)
        except RecipeError as error:
            used = [axis for axis in ("tensor", "pipeline") if layout.sizes[axis] > 1]
            if len(used) == 1:
                self.rejected.setdefault(used[0], str(error))
        else:
            yield layout

    def _choices(self, layout: Layout, offload: bool) -> Iterator[Choice]:
        """`offload`: with CPU offload; a last resort, since it is limited by PCIe bandwidth."""
        training, options = self.recipe.training, self.recipe.distributed
        modes: Iterable[Checkpointing] = (training.activation_checkpointing,)
        if self.thorough and training.activation_checkpointing == "none" and self._can_checkpoint:
            modes = CHECKPOINTING_MODES
        base = Choice(
            layout,
            self.planner.precision,
            rows=1,
            offload=self.planner.offload(layout),
            compiled=training.compile is True,
            reduce_each=options.fsdp.reduce_each_micro_batch,
            schedule=options.pipeline_options.schedule,
            keep_gathered=options.fsdp.sharding == "shard_grad_op",
            optimizer=OptimizerChoice.of(training),
        )
        if offload:
            if base.offload != "none" or not (base.sharded or layout.zero >= 2):
                return
            base = replace(base, offload="optimizer" if layout.zero == 2 else "all")
        for checkpointing in modes:
            for sizes in self._sizes(layout):
                yield from self._sized(replace(base, checkpointing=checkpointing), sizes)

    @property
    def _can_checkpoint(self) -> bool:
        """Recomputing a block would update batch normalisation's running statistics twice."""
        model = self.planner.subject.model
        return not any(isinstance(module, MaskedBatchNorm) for module in model.modules())

    def _sizes(self, layout: Layout) -> list[BatchSizes]:
        training = self.recipe.training
        given = (training.per_device_batch_size, training.gradient_accumulation_steps)
        if given != ("auto", "auto"):
            return [solve(training, layout.data_ranks)]
        candidates = micro_batches(training.global_batch_size, layout.data_ranks)
        return candidates[:1] if layout.pipeline > 1 else candidates

    def _sized(self, choice: Choice, sizes: BatchSizes) -> Iterator[Choice]:
        """With batch sizes, and for a pipeline with its number of micro-batches."""
        layout, samples = choice.layout, sizes.per_device
        if layout.pipeline == 1:
            sized = replace(choice, rows=samples, accumulation=sizes.accumulation)
            yield sized
            if (
                self.thorough
                and choice.sharded
                and sizes.accumulation > 1
                and not choice.reduce_each
            ):
                yield replace(sized, reduce_each=True)
            return
        asked = self.recipe.distributed.pipeline_options.microbatches
        wanted = [asked] if isinstance(asked, int) else [-(-samples // n) for n in (1, 2, 4, 8)]
        for microbatches in wanted:
            if layout.pipeline <= microbatches <= samples:
                rows = math.ceil(samples / microbatches)
                yield replace(
                    choice, rows=rows, microbatches=microbatches, accumulation=sizes.accumulation
                )


def _fits_without(choice: Choice, fitting: set[Choice]) -> bool:
    """Whether it fits without activation checkpointing."""
    return replace(choice, checkpointing="none") in fitting


def rank(plans: list[Plan]) -> list[Plan]:
    """Fastest first; but of those within `TIE` of the fastest, the simplest is first."""
    ordered = sorted(plans, key=lambda plan: (plan.duration.total, complexity(plan)))
    if not ordered:
        return []
    limit = ordered[0].duration.total * (1 + TIE)
    leading = [plan for plan in ordered if plan.duration.total <= limit]
    first = min(leading, key=lambda plan: (complexity(plan), plan.duration.total))
    return [first, *(plan for plan in ordered if plan is not first)]


def complexity(plan: Plan) -> tuple[int, int, int, int]:
    """Greater for what is harder to run."""
    choice = plan.choice
    axes = sum(size > 1 for size in choice.layout.sizes.values())
    return (
        int(choice.offload != "none"),
        BY_COMPLEXITY.index(plan.strategy),
        axes,
        CHECKPOINTING_MODES.index(choice.checkpointing),
    )


def _powers(number: int) -> list[int]:
    """Divisors that are powers of two, and the number itself."""
    return [
        d for d in range(1, number + 1) if (number % d == 0 and d & (d - 1) == 0) or d == number
    ]
