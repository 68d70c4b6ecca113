"""What is planned: a recipe's task with representative batches."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor, nn

from muster.data.batches import BatchPlan, cut
from muster.data.loader import Batch, Source
from muster.errors import RecipeError
from muster.models.plan import ParallelPlan
from muster.parallel.default_plan import plan_of
from muster.planner.meta import on_meta
from muster.recipe.schema import Recipe
from muster.tasks.base import Task

TIMED_SAMPLES = 4
DEEPEST = 3  # blocks of a stack in a recording
SAMPLED_STEPS = 64  # of an epoch, to estimate padding


@dataclass(frozen=True, eq=False)
class Subject:
    """A task to plan for. Its data, where available, gives the lengths of samples."""

    recipe: Recipe
    task: Task
    source: Source | None = None

    @cached_property
    def model(self) -> nn.Module:
        """The whole model on the meta device."""
        with on_meta():
            return self.task.build_model()

    @cached_property
    def plan(self) -> ParallelPlan:
        return plan_of(self.model, self.task)

    @cached_property
    def shallow(self) -> nn.Module:
        """The model as deep as the deepest recording, on the meta device."""
        with on_meta():
            model = self.task.build_model()
        truncate(model, self.plan, dict.fromkeys(blocks_of(model, self.plan.blocks), DEEPEST))
        return model

    def part(self, start: int, stop: int) -> nn.Module:
        """Layers `start` … `stop - 1` on the meta device."""
        if (start, stop) not in self._parts:
            with on_meta():
                self._parts[start, stop] = self.task.build_part(start, stop)
        return self._parts[start, stop]

    @cached_property
    def _parts(self) -> dict[tuple[int, int], nn.Module]:
        return {}

    @cached_property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @cached_property
    def trained(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @cached_property
    def loading_seconds(self) -> float:
        """To load and collate the samples of one step on this machine."""
        if self.source is None or self.task.facts.packed:
            return 0.0
        index, begin = self._average_index, time.perf_counter()
        samples = [self.source.load(index) for _ in range(TIMED_SAMPLES)]
        self.task.collate(samples, 0, float(self.source.lengths[index]))
        each = (time.perf_counter() - begin) / TIMED_SAMPLES
        workers = self.recipe.data.workers
        threads = workers if isinstance(workers, int) else 4
        return each * self.recipe.training.global_batch_size / max(1, threads)

    def batch(self, rows: int, *, costliest: bool) -> Batch:
        """`rows` samples of the maximum length, or of the average padded length. Real CPU
        tensors, of which only the shapes matter."""
        if self.source is None or self.task.facts.packed:
            sample = self.task.example()
            if sample is None:
                raise RecipeError(
                    f"{self.recipe.task}: a plan needs the size of its samples, and it has no training "
                    "data here; return samples from source('train'), or one from example()"
                )
            return self.task.collate([sample] * rows, 0)
        index = self._longest_index if costliest else self._average_index
        sample = self.source.load(index)
        return self.task.collate([sample] * rows, 0, float(self.source.lengths[index]))

    @cached_property
    def uniform(self) -> bool:
        """Whether the costliest micro-batch has the shapes of the average one."""
        costliest, usual = (signature(self.batch(1, costliest=yes)) for yes in (True, False))
        return costliest == usual

    @cached_property
    def _longest_index(self) -> int:
        assert self.source is not None
        return int(np.argmax(self.source.lengths))

    @cached_property
    def _average_index(self) -> int:
        """The sample closest to the average padded length."""
        assert self.source is not None
        lengths = self.source.lengths
        windows = self.task.windows(lengths, training=True)
        total = min(self.recipe.training.global_batch_size, len(lengths))
        plan = BatchPlan(
            lengths, total, self.recipe.seed, self.recipe.data.pool_batches, windows=windows
        )
        steps = range(min(SAMPLED_STEPS, plan.steps_per_epoch))
        padded = [
            float(lengths[part].max())
            for step in steps
            for parts in cut(plan.batch(step), lengths, 1, 1)
            for part in parts
        ]
        return int(np.argmin(np.abs(lengths - np.mean(padded))))


def signature(batch: Batch) -> dict[str, Any]:
    """What a recording depends on."""
    return {name: layout_of(value) for name, value in batch.tensors.items()}


def layout_of(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape), value.stride())
    return (repr(value),)


def fake(batch: Batch, mode: Any) -> Batch:
    """The batch as fake tensors."""
    tensors = {
        name: mode.from_tensor(tensor) if isinstance(tensor, Tensor) else tensor
        for name, tensor in batch.tensors.items()
    }
    return dataclasses.replace(batch, tensors=tensors)


def blocks_of(model: nn.Module, names: Sequence[str]) -> dict[str, list[nn.Module]]:
    """Stacks of repeated blocks, by the name of their parent module."""
    stacks = {}
    for name, module in model.named_modules():
        children = list(module.children())
        if children and all(type(child).__name__ in names for child in children):
            stacks[name] = children
    return stacks


def truncate(model: nn.Module, plan: ParallelPlan, depths: Mapping[str, int]) -> None:
    """Keeps the first `depths[name]` blocks of each stack, in place."""
    for name in blocks_of(model, plan.blocks):
        stack: Any = model.get_submodule(name)
        for key in list(stack._modules)[depths[name] :]:
            del stack._modules[key]
