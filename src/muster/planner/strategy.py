"""Layout and batch sizes of a run: the recipe's, or the planner's where it says `auto`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch

from muster.data.loader import Source
from muster.errors import MusterError
from muster.hardware import catalogue, rehearsal
from muster.hardware.catalogue import Accelerator
from muster.parallel.layout import Layout, layout_for
from muster.parallel.mesh import Mesh
from muster.parallel.stages import microbatches
from muster.planner.memory import GIB, Choice
from muster.planner.meta import parameters_of
from muster.planner.optimizer import OptimizerChoice
from muster.planner.planner import Plan, Planner
from muster.planner.search import search
from muster.planner.subject import Subject
from muster.planner.time import Cluster
from muster.recipe.batch import BatchSizes, solve
from muster.recipe.schema import Recipe
from muster.tasks.base import Task

log = logging.getLogger(__name__)

WEIGHT_BYTES = 4  # float32
GRADIENT_BYTES = 4
SHARE = 0.6  # of a device's memory; the rest is for activations, buffers and the context


@dataclass(frozen=True)
class Decision:
    """The layout and the batch sizes of a run, and the memory and step time they should have."""

    layout: Layout
    sizes: BatchSizes
    expected: dict[str, Any] = field(default_factory=dict)  # memory_gib, step_time_s …


def decide(recipe: Recipe, task: Task, source: Source, mesh: Mesh, precision: str) -> Decision:
    """The same on all ranks: rank 0 plans for the smallest device and broadcasts its decision or error.
    On CPU ranks, where a recording may take longer than the run, a parameter count decides."""
    smallest = min(mesh.gather(device_bytes(mesh)))
    per_node = max(mesh.gather(mesh.local_world))
    layout = layout_by_arithmetic(recipe, task, mesh.world, smallest, per_node)
    if mesh.device.type == "cpu":
        return Decision(layout, solve(recipe.training, layout.data_ranks))
    answer: Decision | MusterError | None = None
    if mesh.first:
        try:
            cluster = Cluster(_accelerator(mesh.device, smallest), mesh.world, per_node)
            answer = propose(Subject(recipe, task, source), cluster, precision)
        except MusterError as error:
            answer = error
        except Exception as error:  # a model that fake tensors cannot run can still be trained
            log.warning("no plan for this model, so the run is not compared to one: %s", error)
    answer = mesh.gather(answer)[0]
    if isinstance(answer, MusterError):
        raise answer
    if answer and rehearsal.active():  # times are not compared
        kept = {k: v for k, v in answer.expected.items() if not k.startswith("step_")}
        answer = replace(answer, expected=kept)
    return answer or Decision(layout, solve(recipe.training, layout.data_ranks))


def propose(subject: Subject, cluster: Cluster, precision: str) -> Decision:
    """The recipe's settings with each `auto` resolved, and the expected memory and step time."""
    recipe = subject.recipe
    planner = Planner(
        subject, cluster, precision
    )  # deterministic, so that a resumed run decides the same
    found = search(planner, thorough=False)
    best = found.best or found.closest
    if best is None:  # far too large, or not one sample for each rank, which `solve` refuses
        shards = "fsdp" if recipe.distributed.strategy == "auto" else None
        layout = layout_for(recipe.distributed, cluster.world, shards, cluster.per_node)
        return Decision(layout, solve(recipe.training, layout.data_ranks))
    if found.best is None:
        log.warning(
            "the plan does not fit: %s. `muster plan` also tries tensor and pipeline "
            "parallelism, checkpointing and offload",
            planner.shortfall(best),
        )
    layout, sizes = best.choice.layout, _sizes(recipe, best, best.choice.layout)
    planner = replace(planner, measure_loading=True)
    expected = expected_metrics(planner, _with_microbatches(recipe, best.choice, sizes))
    return Decision(layout, sizes, expected)


def _with_microbatches(recipe: Recipe, choice: Choice, sizes: BatchSizes) -> Choice:
    """The choice with the number of micro-batches that a run's pipeline will have."""
    layout, samples = choice.layout, sizes.per_device
    if layout.pipeline == 1:
        return choice
    count = microbatches(recipe.distributed.pipeline_options, layout.pipeline, samples)
    return replace(choice, rows=-(-samples // count), microbatches=count)


def _sizes(recipe: Recipe, best: Plan, layout: Layout) -> BatchSizes:
    asked = (recipe.training.per_device_batch_size, recipe.training.gradient_accumulation_steps)
    if asked != ("auto", "auto") or layout.pipeline > 1:
        return solve(recipe.training, layout.data_ranks)
    return BatchSizes(
        recipe.training.global_batch_size,
        best.choice.rows,
        best.choice.accumulation,
        layout.data_ranks,
    )


def expected_metrics(planner: Planner, choice: Choice) -> dict[str, Any]:
    """What the run's results are compared to."""
    plan = planner.evaluate(choice)
    return {
        "device": planner.cluster.device.title,
        "memory_gib": plan.memory.allocated / GIB,
        "memory_parts_gib": {k: v / GIB for k, v in plan.memory.parts.items() if v},
        "step_time_s": plan.duration.total,
        "step_parts_s": {k: v for k, v in vars(plan.duration).items() if v},
    }


def _accelerator(device: torch.device, smallest: int) -> Accelerator:
    """This rank's, with the memory of the smallest; an unknown one is treated as an A100."""
    properties = torch.cuda.get_device_properties(device)
    known = catalogue.recognise(properties.name, properties.total_memory / GIB)
    if known is None:
        log.warning("%s is not in the catalogue; step times are those of an A100", properties.name)
        known = catalogue.find("a100")
    return replace(catalogue.own(known), memory_gib=smallest / GIB)


def layout_by_arithmetic(
    recipe: Recipe, task: Task, world: int, smallest: int, per_node: int
) -> Layout:
    """For `auto`, DDP while a copy fits on the smallest device, else FSDP."""
    if recipe.distributed.strategy != "auto":
        return layout_for(recipe.distributed, world, local_world=per_node)
    fits = training_bytes(recipe, task) <= SHARE * smallest
    return layout_for(recipe.distributed, world, "ddp" if fits else "fsdp")


def training_bytes(recipe: Recipe, task: Task) -> int:
    parameters = parameters_of(task.build_model)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    each = GRADIENT_BYTES + OptimizerChoice.of(recipe.training).least_bytes
    return WEIGHT_BYTES * sum(p.numel() for p in parameters) + each * trained


def parameter_count(task: Task) -> int:
    return sum(p.numel() for p in parameters_of(task.build_model))


def device_bytes(mesh: Mesh) -> int:
    """Memory of this rank: its GPU's, or its share of a GPU or of the host."""
    if mesh.device.type == "cuda":
        return torch.cuda.get_device_properties(mesh.device).total_memory // mesh.ranks_per_gpu
    return int(psutil.virtual_memory().total) // mesh.local_world
