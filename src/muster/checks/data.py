"""Step 10: whether the recipe's data is read as fast as its model consumes it."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from muster import run_directory
from muster.checks.context import RankContext, RankReport
from muster.checks.findings import SLOW, TOO_SLOW, Finding, RankNames, Status
from muster.parallel.gradients import clip_divisor
from muster.recipe.load import load

if TYPE_CHECKING:
    from muster.data.loader import Batch
    from muster.training.job import Job

STEPS = 6  # of the model; the first two are warm-up
READ_S = 3.0
MAX_BATCHES = 64  # batches
INDEX_S = 600.0

QUIET = ["logging.to=[]", "checkpoint.resume=auto", "checkpoint.every_steps=null"]


def measure(context: RankContext) -> RankReport:
    """Optimizer steps per second, of the loader and of the model."""
    from muster.worker.prepare import (  # imports all of training; not every check needs it
        open_task,
        prepare,
    )

    options = context.options
    recipe = load(options.recipe or "", [*options.overrides, *QUIET])
    task = open_task(recipe)
    context.barrier("indexed", INDEX_S)  # one host may have to read all audio first, another not
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "ranks").mkdir()
        job = prepare(recipe, context.mesh, run_directory.Run(Path(folder)), task)
        kept, read = _read(job)
        context.mesh.barrier()
        trained = _train(job, kept)
        job.observer.close()
    return {
        "read_per_s": read,
        "taken_per_s": trained,
        "samples": job.recipe.training.global_batch_size,
        "workers": job.loader.workers,
        "gpu": context.mesh.device.type == "cuda",
    }


def _read(job: Job) -> tuple[list[list[Batch]], float]:
    """Batches as training gets them, without a model computing at the same time."""
    kept: list[list[Batch]] = []
    batches = job.loader.steps(0, max(job.steps, STEPS))
    started, count = time.perf_counter(), 0
    for batch in batches:
        count += 1
        passed = time.perf_counter() - started
        if len(kept) < STEPS:
            kept.append(batch)
        elif passed > READ_S or count == MAX_BATCHES:
            break
    batches.close()  # type: ignore[attr-defined]
    return kept, count / passed


def _train(job: Job, kept: list[list[Batch]]) -> float:
    """The training loop's own step on batches that are already loaded."""
    for part in job.engine.parts:
        part.train()
    times = []
    for batches in kept:
        started = time.perf_counter()
        units, _ = job.mesh.sum(sum(batch.units for batch in batches))
        job.engine.accumulate(batches, replace(job.functions, scale=job.scale.value / units))
        norm = job.engine.grad_norm(job.scale.value)
        divisor = clip_divisor(norm, job.recipe.training.max_grad_norm, job.scale.value)
        job.engine.step(job.recipe.training.lr, divisor)
        job.engine.zero_grad()
        if job.mesh.device.type == "cuda":
            torch.cuda.synchronize(job.mesh.device)
        times.append(time.perf_counter() - started)
    return 1 / statistics.median(times[2:] or times)


def judge(reports: Mapping[int, RankReport], rank_names: RankNames) -> list[Finding]:
    """The slowest rank counts, for the loader and for the model."""
    slowest = min(reports, key=lambda rank: reports[rank]["read_per_s"])
    report = reports[slowest]
    wanted = min(report["taken_per_s"] for report in reports.values())
    ratio = report["read_per_s"] / wanted
    figures = {
        "read_samples_per_s": report["read_per_s"] * report["samples"],
        "model_samples_per_s": wanted * report["samples"],
    }
    message = (
        f"read {figures['read_samples_per_s']:.3g} samples/s, the model takes "
        f"{figures['model_samples_per_s']:.3g}"
    )
    if ratio >= SLOW:
        return [Finding("data", "ok", f"enough: {message}", figures=figures)]
    status: Status = "fail" if ratio < 1 / TOO_SLOW else "warn"
    return [
        Finding(
            "data",
            status,
            f"not enough: {message}; the slowest rank is {rank_names.name(slowest)}",
            cause=f"decoding on {report['workers']} thread(s) per rank, or the storage, is slower than the "
            "model",
            cure="raise data.workers if cores are free, put the data on a local disk, or store it "
            "decoded or at the model's sampling rate",
            ranks=(slowest,),
            hosts=rank_names.hosts_of([slowest]),
            figures=figures,
        )
    ]
