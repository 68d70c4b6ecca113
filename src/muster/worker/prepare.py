"""Everything that a rank builds before its first step: data, layout, engine, and the checkpoint to
resume from."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from muster import run_directory
from muster.auto import AutoChoice
from muster.data.batches import BatchPlan
from muster.data.loader import Loader, Source
from muster.data.mixture import mixture_of
from muster.errors import DataError, RecipeError, StartAgain
from muster.hardware import cpus, rehearsal
from muster.hardware.environment import data_workers
from muster.observe.choices import read_choices, write_choices
from muster.observe.profile import Profile
from muster.parallel import compilation
from muster.parallel.apply import apply
from muster.parallel.compilation import CompilationError
from muster.parallel.deepspeed_config import config_for
from muster.parallel.engine import Engine
from muster.parallel.float8 import Float8
from muster.parallel.layout import Layout, layout_for
from muster.parallel.mesh import Mesh
from muster.parallel.stages import microbatches
from muster.planner.strategy import decide, parameter_count
from muster.recipe.batch import BatchSizes, settle
from muster.recipe.own_task import parse
from muster.recipe.schema import Recipe
from muster.tasks import build_task
from muster.tasks.base import Task
from muster.training import memory
from muster.training.checkpoint import Checkpoints
from muster.training.compatibility import refuse_other_data, refuse_other_recipe
from muster.training.job import Job
from muster.training.manifest import Saved, open_checkpoint
from muster.training.mirror import Mirror
from muster.training.optimizer import make_optimizer
from muster.training.precision import LossScale, autocast, shared_precision
from muster.training.replicas import kind
from muster.training.rewind import (
    Rewind,
    known_rewinds,
    read_rewinds,
    remove_overtaken,
    write_rewinds,
)
from muster.training.selection import Selection, selection_for
from muster.training.spikes import History
from muster.training.trial import try_task
from muster.urls import is_remote
from muster.worker.observer import make_observer
from muster.worker.results import write_data, write_plan
from muster.writing import write_json

log = logging.getLogger(__name__)


def prepare(recipe: Recipe, mesh: Mesh, run: run_directory.Run, task: Task | None = None) -> Job:
    """Build everything and load the newest checkpoint."""
    layout = layout_for(recipe.distributed, mesh.world, local_world=mesh.local_world)
    recipe = settle(recipe, layout.data_ranks)
    precision = shared_precision(recipe.training.precision, mesh)
    task = task or open_task(recipe)
    source = open_source(task, recipe, mesh)
    choices = mesh.gather(read_choices(run.path))[0]
    compiled = _choose_compilation(
        recipe, len(source), mesh, choices.get("compile"), compiles=task.facts.compiles
    )
    choices["compile"] = compiled
    recipe = compilation.with_compile(recipe, compiled.used)
    asked_fp8 = recipe.training.precision == "fp8"
    if asked_fp8 and not compiled.used and mesh.first:
        log.warning(
            "training.precision: fp8 is slower than bf16 where nothing is compiled (%s)", compiled
        )
    decision = decide(recipe, task, source, mesh, precision)
    mesh = mesh.with_layout(decision.layout)
    pieces = _pipeline_pieces(recipe, mesh.layout, decision.sizes)
    sizes = memory.shrunk_sizes(decision.sizes, mesh, run.path, pieces)
    loader = open_data(recipe, task, source, mesh, sizes, pieces)
    try:
        engine = build_engine(recipe, task, mesh, sizes, precision, run)
    except CompilationError as error:  # on all ranks
        if not compiled.optional:
            raise
        write_choices(run.path, {**choices, "compile": AutoChoice(False, str(error))})
        raise StartAgain(f"{error}; after the restart, nothing is compiled") from error
    if own := parse(recipe.task):
        try_task(own, task, engine, source, mesh, lambda: autocast(precision, mesh.device))
    steps = recipe.training.steps or loader.plan.steps_per_epoch * (recipe.training.epochs or 1)
    _check_decay(recipe, steps)
    selection = selection_for(recipe, task, steps)
    checkpoints, resumed = resume(recipe, task, source, mesh, run, engine)
    owes = selection is not None and _restore(selection, resumed, checkpoints, recipe)
    observer = make_observer(recipe, mesh, run, resumed.step)
    parameters = parameter_count(task)
    expected = decision.expected
    named = "fp8" if asked_fp8 else precision
    write_plan(run, mesh, sizes, loader.plan, steps, named, parameters, expected, choices)
    checkpoints.tell = observer.event
    if checkpoints.mirror:
        checkpoints.mirror.tell = observer.event
    if resumed.saved or resumed.passed_over:
        observer.event(
            "resumed",
            step=resumed.step,
            path=str(resumed.saved and resumed.saved.path),
            passed_over=resumed.passed_over,
            world=mesh.world,
            saved_by=(resumed.saved.manifest if resumed.saved else {}).get("world", mesh.world),
        )
    if mesh.first:
        observer.event("data", lines=write_data(run, task, recipe))
    scale = LossScale.for_precision(precision)
    scale.load(resumed.trainer.get("scale", {}))
    spikes = History(recipe.training.spike_deviations)
    spikes.load(resumed.trainer.get("spikes", "[]"))
    observer.event(
        "started",
        step=resumed.step,
        steps=steps,
        world=mesh.world,
        rehearsal=rehearsal.active(),
    )
    asked = recipe.logging.profile
    return Job(
        recipe,
        task,
        engine,
        mesh,
        loader,
        checkpoints,
        observer,
        precision,
        steps,
        start=resumed.step,
        bad_steps=resumed.trainer.get("bad_steps", 0),
        scale=scale,
        spikes=spikes,
        rewinds=resumed.rewinds,
        mixed=len(set(mesh.gather(kind(mesh.device)))) > 1,
        selection=selection,
        owes_evaluation=owes and resumed.step < steps,
        choices=choices,
        profile=Profile(run.path, mesh.rank, mesh.device, asked, resumed.step, steps),
    )


def _restore(
    selection: Selection, resumed: Resumed, checkpoints: Checkpoints, recipe: Recipe
) -> bool:
    """The best so far, from a checkpoint of this run: another run's are not here to be kept. Returns whether
    the evaluation of the step it resumes at was due and not made."""
    if resumed.saved is None or resumed.saved.path.parent != checkpoints.root:
        return False
    selection.load(resumed.trainer.get("selection") or {}, checkpoints.complete())
    every = recipe.evaluation.every_steps
    return every is not None and resumed.step % every == 0 and selection.step != resumed.step


def _check_decay(recipe: Recipe, steps: int) -> None:
    try:
        recipe.training.refuse_long_decay(steps)
    except ValueError as error:
        raise RecipeError(f"training: {error}") from None


def _choose_compilation(
    recipe: Recipe, samples: int, mesh: Mesh, earlier: AutoChoice | None, *, compiles: bool
) -> AutoChoice:
    """As at the run's first start, if there was one. Of several ranks all compile, or none: a rank that
    cannot would leave the others waiting for it."""
    on_gpu = mesh.device.type == "cuda"
    if recipe.training.compile == "auto" and earlier and on_gpu:
        return earlier
    chosen = compilation.choose(recipe, samples, on_gpu=on_gpu, compiles=compiles)
    if not (chosen.used and chosen.optional) or mesh.world == 1:
        return chosen
    for rank, error in enumerate(mesh.gather(compilation.compiler_error(mesh.device))):
        if error:
            return AutoChoice(False, f"rank {rank} cannot compile ({error})")
    return chosen


def open_data(
    recipe: Recipe, task: Task, source: Source, mesh: Mesh, sizes: BatchSizes, pieces: int
) -> Loader:
    """This rank's share of every global batch, in micro-batches of as many `pieces`."""
    plan = BatchPlan(
        source.lengths,
        sizes.global_batch,
        recipe.seed,
        recipe.data.pool_batches,
        groups=source.groups,
        windows=task.windows(source.lengths, training=True),
        mixture=mixture_of(source, recipe.data.weights),
    )
    source.reserve(plan.reserve_size)
    workers = recipe.data.workers
    return Loader(
        source,
        plan,
        task.collate,
        rank=mesh.data_rank,
        ranks=mesh.layout.data_ranks,
        accumulation=sizes.accumulation * pieces,
        workers=_data_workers(mesh) if workers == "auto" else workers,
        prefetch=recipe.data.prefetch,
        pin=mesh.device.type == "cuda",
    )


def _data_workers(mesh: Mesh) -> int:
    """On the cores that this rank is pinned to, which it shares with no other."""
    cpu, gpu = cpus.find(Path("/")), mesh.device.type == "cuda"
    return data_workers(len(cpu.allowed), cpu.quota, mesh.local_world, gpu)


def build_engine(
    recipe: Recipe,
    task: Task,
    mesh: Mesh,
    sizes: BatchSizes,
    precision: str,
    run: run_directory.Run,
) -> Engine:
    """The model and its optimizer in the layout, with weights initialized from the seed or loaded."""
    torch.manual_seed(recipe.seed)
    solved = _with_sizes(recipe, sizes)
    if mesh.layout.zero and mesh.first:
        document = config_for(solved, mesh.layout.zero, mesh.world, precision)
        write_json(run.path / "deepspeed.json", document)
    make = lambda named: make_optimizer(recipe.training, named)  # noqa: E731
    float8: Float8 = "device" if recipe.training.precision == "fp8" else "none"
    return apply(task, mesh, solved, precision, make, float8=float8)


@dataclass(frozen=True)
class Resumed:
    """Where a run resumes: the checkpoint it was loaded from, if any, the trainer's state, and what is left out."""

    saved: Saved | None
    passed_over: list[str]
    trainer: dict[str, Any]
    rewinds: list[Rewind] = field(default_factory=list)

    @property
    def step(self) -> int:
        return int(self.trainer["step"])


def resume(
    recipe: Recipe, task: Task, source: Source, mesh: Mesh, run: run_directory.Run, engine: Engine
) -> tuple[Checkpoints, Resumed]:
    """The run's checkpoints, and the newest complete one loaded into `engine`."""
    data = _fingerprint(source, mesh, recipe.data.weights)
    checkpoints = Checkpoints(
        run.path / "checkpoints",
        mesh,
        recipe.as_dict(),
        {**task.assets, "data": data},
        keep=recipe.checkpoint.keep,
        asynchronous=recipe.checkpoint.asynchronous,
        verify=recipe.checkpoint.verify,
        mirror=_mirror(recipe, run) if mesh.first else None,
    )
    rewinds = mesh.gather(read_rewinds(run.path))[0]
    remove_overtaken(checkpoints, rewinds)
    saved, passed_over = _resume_from(recipe, checkpoints)
    if saved is None:
        return checkpoints, Resumed(None, passed_over, {"step": 0}, rewinds)
    refuse_other_data(saved, data)
    trainer = checkpoints.load(saved, engine)
    known = known_rewinds(rewinds, trainer)
    if known != rewinds and mesh.first:
        write_rewinds(run.path, known)  # a mirror has no files but checkpoints
    return checkpoints, Resumed(saved, passed_over, trainer, known)


def _mirror(recipe: Recipe, run: run_directory.Run) -> Mirror | None:
    address = recipe.checkpoint.mirror
    return (
        None
        if address is None
        else Mirror(address, run.name, run.path / "checkpoints", recipe.checkpoint.keep)
    )


def _fingerprint(source: Source, mesh: Mesh, weights: tuple[float, ...] | None) -> dict[str, Any]:
    """Identifies the data; refused where it is not the same on all ranks."""
    lengths = hashlib.sha256(source.lengths.tobytes())
    lengths.update(source.fingerprint())
    if mixture := mixture_of(source, weights):
        lengths.update(mixture.fingerprint())
    mine = {
        "samples": len(source),
        "lengths": lengths.hexdigest(),
        "shuffle": "full" if source.groups is None else "groups",
    }
    for rank, theirs in enumerate(mesh.gather(mine)):
        if theirs != mine:
            raise DataError(
                f"data.train: rank {rank} finds {theirs['samples']} samples and rank {mesh.rank} "
                f"{mine['samples']}, or others of the same number; give every machine the same data"
            )
    return mine


def _with_sizes(recipe: Recipe, sizes: BatchSizes) -> Recipe:
    """The recipe with the batch sizes that were left open filled in."""
    found = {
        "per_device_batch_size": sizes.per_device,
        "gradient_accumulation_steps": sizes.accumulation,
    }
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=found)})


def open_source(task: Task, recipe: Recipe, mesh: Mesh) -> Source:
    source = task.source("train")
    if source is None and parse(recipe.task):
        raise DataError(f"{recipe.task}: source('train') returned None; a run needs samples")
    if source is None:
        raise DataError(f"data.train: {recipe.data.train_words} has no training data")
    if mesh.device.type == "cpu":  # decoding while the CPU computes slows both down
        source.preload(torch.get_num_threads())
    return source


def open_task(recipe: Recipe) -> Task:
    """The task, its data indexed. Called before the rendezvous: an index of durations or a stream of
    tokens is built once per machine, under a lock, and may take longer than the timeout."""
    task = build_task(recipe)
    for split in ("train", "validation", "test"):
        task.source(split)
    return task


def _pipeline_pieces(recipe: Recipe, layout: Layout, sizes: BatchSizes) -> int:
    """Pipeline micro-batches of each micro-batch; without a pipeline, 1."""
    if layout.pipeline == 1:
        return 1
    options = recipe.distributed.pipeline_options
    pieces = microbatches(options, layout.pipeline, sizes.per_device)
    needed = pieces * sizes.accumulation * sizes.data_ranks
    if needed > sizes.global_batch:
        raise RecipeError(
            f"training.global_batch_size: {sizes.global_batch} cannot feed {sizes.data_ranks} data "
            f"rank(s) × {sizes.accumulation} accumulation step(s) × {pieces} pipeline micro-batches; "
            f"raise it to at least {needed}, or lower distributed.pipeline_options.microbatches"
        )
    return pieces


def _resume_from(recipe: Recipe, checkpoints: Checkpoints) -> tuple[Saved | None, list[str]]:
    """This run's own newest checkpoint; in a new run, the one the recipe names, if any."""
    asked = recipe.checkpoint.resume
    saved, passed_over = checkpoints.newest()
    if saved is None and asked != "auto" and not is_remote(asked):
        saved = open_checkpoint(Path(asked), checkpoints.mesh.rank, checkpoints.mesh.world)
    if saved is not None:
        refuse_other_recipe(saved, recipe.as_dict())
        log.info("resuming at step %d from %s", saved.step, saved.path)
    for words in passed_over:
        log.warning("passed over: %s", words)
    return saved, passed_over
