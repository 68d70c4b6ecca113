"""Step 9: whether the recipe's data is read as fast as its model asks for it."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from muster import runs
from muster.check.findings import SLOW, TOO_SLOW, Finding, Roll, Status
from muster.check.seat import Account, Seat
from muster.recipe.load import load

if TYPE_CHECKING:
    from muster.data.loader import Batch
    from muster.train.loop import Job

STEPS = 6  # of the model; the first two make it ready
READ_S = 3.0
MOST_READ = 64  # batches
INDEX_S = 600.0

QUIET = ["logging.tensorboard=false", "checkpoint.resume=auto", "checkpoint.every_steps=null"]


def measure(seat: Seat) -> Account:
    """Optimizer steps per second that the loader could feed, and that the model could take."""
    from muster.worker.prepare import look, prepare  # all of training; not every check needs it

    options = seat.options
    recipe = load(options.recipe or "", [*options.overrides, *QUIET])
    task = look(recipe, seat.place.world)
    seat.meet("indexed", INDEX_S)  # one host may have to read all audio first, another not
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "ranks").mkdir()
        job = prepare(recipe, seat.mesh, runs.Run(Path(folder)), task)
        kept, read = _read(job)
        seat.mesh.barrier()
        taken = _take(job, kept)
        job.observer.close()
    return {
        "read_per_s": read,
        "taken_per_s": taken,
        "samples": recipe.training.global_batch_size,
        "workers": job.loader.workers,
        "gpu": seat.mesh.device.type == "cuda",
    }


def _read(job: Job) -> tuple[list[list[Batch]], float]:
    """Batches as training gets them, with nobody computing beside."""
    kept: list[list[Batch]] = []
    batches = job.loader.steps(0, max(job.steps, STEPS))
    started, count = time.perf_counter(), 0
    for batch in batches:
        count += 1
        passed = time.perf_counter() - started
        if len(kept) < STEPS:
            kept.append(batch)
        elif passed > READ_S or count == MOST_READ:
            break
    batches.close()  # type: ignore[attr-defined]
    return kept, count / passed


def _take(job: Job, kept: list[list[Batch]]) -> float:
    """The loop's own step on batches that lie ready."""
    for part in job.engine.parts:
        part.train()
    times = []
    for batches in kept:
        started = time.perf_counter()
        units, _ = job.mesh.sum(sum(batch.units for batch in batches))
        job.engine.accumulate(batches, replace(job.work, scale=job.scale.value / units))
        job.engine.clip_(job.recipe.training.max_grad_norm, job.scale.value)
        job.engine.step(job.recipe.training.lr)
        job.engine.zero_grad()
        if job.mesh.device.type == "cuda":
            torch.cuda.synchronize(job.mesh.device)
        times.append(time.perf_counter() - started)
    return 1 / statistics.median(times[2:] or times)


def judge(accounts: Mapping[int, Account], roll: Roll) -> list[Finding]:
    """The slowest reader sets the pace of all; the model's pace is the slowest rank's too."""
    slowest = min(accounts, key=lambda rank: accounts[rank]["read_per_s"])
    said = accounts[slowest]
    wanted = min(account["taken_per_s"] for account in accounts.values())
    ratio = said["read_per_s"] / wanted
    figures = {
        "read_samples_per_s": said["read_per_s"] * said["samples"],
        "model_samples_per_s": wanted * said["samples"],
    }
    words = (
        f"read {figures['read_samples_per_s']:.3g} samples/s, the model takes "
        f"{figures['model_samples_per_s']:.3g}"
    )
    if ratio >= SLOW:
        return [Finding("data", "ok", f"enough: {words}", figures=figures)]
    status: Status = "fail" if ratio < 1 / TOO_SLOW else "warn"
    return [
        Finding(
            "data",
            status,
            f"not enough: {words}; the slowest reader is {roll.name(slowest)}",
            cause=f"decoding on {said['workers']} thread(s) per rank, or the storage, is slower than the "
            "model",
            cure="raise data.workers if cores are free, put the data on a local disk, or store it "
            "decoded or at the model's sampling rate",
            ranks=(slowest,),
            hosts=roll.hosts_of([slowest]),
            figures=figures,
        )
    ]
