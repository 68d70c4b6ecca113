"""One rank's life: join the others, build, train, score, leave."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from muster import records, runs
from muster.data.batches import BatchPlan
from muster.data.corpus import Split
from muster.data.loader import Loader, Source
from muster.errors import SHRINK, DataError, LaunchError, RecipeError
from muster.hardware import environment, inventory
from muster.launch import cluster
from muster.launch.cluster import Place
from muster.launch.join import join
from muster.launch.rank import die_with_parent, leave_word, settle, speaking_for
from muster.observe import heartbeat, stopping
from muster.observe.logs import log_to_file
from muster.observe.observer import Observer
from muster.observe.profile import Profile
from muster.observe.results import write_json
from muster.parallel import mesh as meshes
from muster.parallel.apply import apply
from muster.parallel.deepspeed_config import config_for
from muster.parallel.layout import Layout, layout_for
from muster.parallel.mesh import Mesh
from muster.parallel.pipeline import microbatches
from muster.plan.batch import BatchSizes
from muster.plan.strategy import decide, parameter_count
from muster.recipe.load import from_resolved
from muster.recipe.schema import Recipe
from muster.tasks import build_task
from muster.tasks.base import Task
from muster.train import memory
from muster.train.checkpoint import (
    Checkpoints,
    Saved,
    open_checkpoint,
)
from muster.train.evaluate import Evaluation, evaluate, tell_broken
from muster.train.loop import Job, agree_on_buffers, train
from muster.train.optimizer import make_optimizer
from muster.train.precision import LossScale, autocast, resolve_precision
from muster.train.same_maths import refuse_other_data, refuse_other_recipe

log = logging.getLogger(__name__)


def run_rank(recipe: Recipe, place: Place, run: runs.Run | None = None) -> dict[str, Any]:
    """Train as one rank of `place.world` in the run directory that rank 0 names.

    Rank 0 gets the results, the others an empty dictionary.
    """
    task = look(recipe, place.world)
    mesh, run = meet(recipe, place, run)
    heartbeat.start(run.path, place.rank, recipe.distributed.stall_limit_s)
    log.info(
        "Distributed Training Initialized: Rank: %d/%d, Local Rank (GPU): %d",
        place.rank,
        place.world,
        place.local_rank,
    )
    try:
        job = prepare(recipe, mesh, run, task)
        results = finish(job, run, train(job))
    except BaseException as error:
        leave_word(run.path, place.rank, error)
        if not isinstance(error, memory.StartSmaller):
            heartbeat.failed(error)
        raise
    job.observer.close()
    meshes.leave()
    heartbeat.stop()
    return results


def meet(recipe: Recipe, place: Place, run: runs.Run | None) -> tuple[Mesh, runs.Run]:
    """Join the other ranks, side by side for now, in rank 0's run directory."""
    options = recipe.distributed
    if run is not None and place.rank == 0:
        heartbeat.clear(run.path)
    mesh = join(place, options.backend, options.timeout_s)
    path: list[Any] = [str(run.path.resolve()) if run else None]
    if mesh.world > 1:
        dist.broadcast_object_list(path)
    _check_shared(Path(path[0]), mesh)
    return mesh, runs.Run(Path(path[0]))


def _check_shared(folder: Path, mesh: Mesh) -> None:
    """A checkpoint's parts come from all nodes, so all of them must see the one run directory."""
    blind = [
        host
        for host, sees in mesh.gather((os.uname().nodename, (folder / "run.json").is_file()))
        if not sees
    ]
    if blind:
        raise LaunchError(
            f"rank 0's run directory {folder} does not exist on {', '.join(sorted(set(blind)))}; put "
            "logging.dir on storage that all nodes share"
        )


def prepare(recipe: Recipe, mesh: Mesh, run: runs.Run, task: Task | None = None) -> Job:
    """Everything built, the newest checkpoint loaded, ready for the first step."""
    precision = resolve_precision(recipe.training.precision, mesh.device)
    task = task or look(recipe, mesh.world)
    source = open_source(task, recipe, mesh)
    decision = decide(recipe, task, source, mesh, precision)
    mesh, sizes = mesh.arranged(decision.layout), decision.sizes
    flow = _flow(recipe, mesh.layout, sizes)
    sizes = memory.shrunk(sizes, mesh, run.path, flow)
    plan = BatchPlan(
        source.lengths,
        sizes.global_batch,
        recipe.seed,
        recipe.data.pool_batches,
        groups=source.groups,
        windows=task.windows(source.lengths, training=True),
    )
    source.reserve(plan.reach)
    steps = recipe.training.steps or plan.steps_per_epoch * (recipe.training.epochs or 1)
    workers = recipe.data.workers
    loader = Loader(
        source,
        plan,
        task.collate,
        rank=mesh.data_rank,
        ranks=mesh.layout.data_ranks,
        accumulation=sizes.accumulation * flow,
        workers=environment.data_workers(inventory.detect(), 1) if workers == "auto" else workers,
        prefetch=recipe.data.prefetch,
        pin=mesh.device.type == "cuda",
    )
    torch.manual_seed(recipe.seed)
    solved = _with_sizes(recipe, sizes)
    if mesh.layout.zero and mesh.first:
        write_json(
            run.path / "deepspeed.json",
            config_for(solved, mesh.layout.zero, mesh.world, precision),
        )
    engine = apply(
        task,
        mesh,
        solved,
        precision,
        lambda named: make_optimizer(recipe.training, named),
    )
    data = _fingerprint(source, mesh)
    checkpoints = Checkpoints(
        run.path / "checkpoints",
        mesh,
        recipe.as_dict(),
        {**task.assets, "data": data},
        keep=recipe.checkpoint.keep,
        asynchronous=recipe.checkpoint.asynchronous,
    )
    saved, passed_over = _resume_from(recipe, checkpoints)
    if saved:
        refuse_other_data(saved, data)
    trainer: dict[str, Any] = checkpoints.load(saved, engine) if saved else {"step": 0}
    observer = Observer(
        run.path,
        mesh.rank,
        every_steps=recipe.logging.every_steps,
        tensorboard=recipe.logging.tensorboard,
        start=trainer["step"],
    )
    records.describe(
        run, mesh, sizes, plan, steps, precision, parameter_count(task), decision.promised
    )
    if saved or passed_over:
        observer.event(
            "resumed", step=trainer["step"], path=str(saved and saved.path), passed_over=passed_over
        )
    scale = LossScale.for_precision(precision)
    scale.load(trainer.get("scale", {}))
    observer.event("started", step=trainer["step"], steps=steps, world=mesh.world)
    asked = recipe.logging.profile
    profile = Profile(run.path, mesh.rank, mesh.device, asked, trainer["step"], steps)
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
        start=trainer["step"],
        bad_steps=trainer.get("bad_steps", 0),
        scale=scale,
        profile=profile,
    )


def _fingerprint(source: Source, mesh: Mesh) -> dict[str, Any]:
    """What tells this data from other data, the same on all ranks or refused."""
    lengths = hashlib.sha256(source.lengths.tobytes())
    lengths.update(source.fingerprint())
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
    if source is None:
        raise DataError(f"data.train: {recipe.data.train} has no training data")
    if mesh.device.type == "cpu":  # decoding beside a CPU that computes slows both down
        source.preload(torch.get_num_threads())
    return source


def look(recipe: Recipe, world: int) -> Task:
    """The task, its data indexed. Ranks look before they meet: an index of durations or a stream of
    tokens is made once per machine, under a lock, and may take longer than a rank waits for others."""
    layout_for(recipe.distributed, world)  # refused before any data is read
    task = build_task(recipe)
    for split in ("train", "validation", "test"):
        task.source(split)
    return task


def _flow(recipe: Recipe, layout: Layout, sizes: BatchSizes) -> int:
    """Pieces of each micro-batch that flow through a pipeline; without one, 1."""
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
    if saved is None and asked != "auto":
        saved = open_checkpoint(Path(asked), checkpoints.mesh.rank, checkpoints.mesh.world)
    if saved is not None:
        refuse_other_recipe(saved, recipe.as_dict())
        log.info("resuming at step %d from %s", saved.step, saved.path)
    for words in passed_over:
        log.warning("passed over: %s", words)
    return saved, passed_over


def final_scores(job: Job) -> Evaluation | None:
    """The test data if there is any, else validation. Every rank takes its share."""
    if not job.recipe.evaluation.final:
        return None
    splits: tuple[Split, ...] = ("test", "validation")
    agree_on_buffers(job)
    for split in splits:
        result = evaluate(
            job.task,
            job.engine,
            split,
            job.mesh,
            job.evaluation_batch,
            lambda: autocast(job.precision, job.mesh.device),
        )
        if result is not None:
            return result
    return None


def finish(job: Job, run: runs.Run, done: int) -> dict[str, Any]:
    """Score what was trained, and write the results: rank 0 returns them."""
    with memory.explained(job, done - 1, "evaluation"):
        final = final_scores(job) if done == job.steps else None
    tell_broken(job.loader.source, job.mesh)
    if not job.mesh.first:
        return {}
    if final:
        job.observer.evaluation(done, final.split, final.scores)
    results = records.results_page(job, run, done) | records.scores_part(final)
    write_json(run.path / "training_results.json", results)
    run.update(state=results["status"], ended=time.time(), exit_code=0)
    return results


def main(folder: str) -> None:
    """A worker process's whole life. It leaves without tearing anything down: all that matters is
    on disk by then, other ranks may still sit in a collective, and destructors can wait for them."""
    run, place, code = runs.Run(Path(folder)), cluster.detect(os.environ), 0
    if place.agent:
        die_with_parent()
    stopping.listen(signal.SIGTERM, signal.SIGUSR1)
    log_to_file(run.path, place.rank)
    try:
        recipe = from_resolved(run.path / "recipe.yaml")
        settle(place, recipe.distributed.strategy)
        with nullcontext() if place.agent else speaking_for(run, place):
            run_rank(recipe, place, run)
    except BaseException as error:
        leave_word(run.path, place.rank, error)
        code = SHRINK if isinstance(error, memory.StartSmaller) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
