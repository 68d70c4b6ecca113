"""The training loop: counts optimizer steps, and computes the same on any layout."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor

from muster.data.corpus import Split
from muster.data.loader import Batch
from muster.errors import DataError
from muster.observe.heartbeat import beat
from muster.observe.observer import StepRecord
from muster.parallel.timestamps import DeviceTimestamp
from muster.train import memory
from muster.train.evaluate import Evaluation, evaluate
from muster.train.job import Job
from muster.train.optimizer import learning_rate, seed_step
from muster.train.precision import autocast

log = logging.getLogger(__name__)


def train(job: Job) -> int:
    """From `job.start` to `job.steps` optimizer steps, or until a stop is requested. Returns steps done."""
    for part in job.engine.parts:
        part.train()
    memory.try_costliest(job)
    done, saving = job.start, job.recipe.checkpoint
    batches = job.loader.steps(job.start, job.steps)
    for step in range(job.start, job.steps):
        job.profile.begin(step, job.mesh)
        stopping = _step(job, step, batches)
        done = step + 1
        last = done == job.steps or stopping
        if _due(done, job.recipe.evaluation.every_steps) and not last:
            score(job, done, "validation")
        if _due(done, saving.every_steps) or stopping or (last and saving.final):
            _save(job, done)
        if last:
            break
    job.profile.end(job.mesh)
    batches.close()  # type: ignore[attr-defined]
    job.observer.flush(job.mesh)
    job.checkpoints.wait()
    return done


@dataclass
class _Step:
    """What one optimizer step computed on this rank, and when. Times are in seconds."""

    batches: list[Batch]
    losses: list[Tensor]
    loss: float  # the mean over the global batch
    grad_norm: float
    lr: float
    samples: int
    amounts: dict[str, float]
    stop: bool  # a stop was requested
    begin: float
    data_wait: float
    skew: float  # waiting for slower ranks
    started: DeviceTimestamp
    synced: DeviceTimestamp

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def _step(job: Job, step: int, batches: Iterator[list[Batch]]) -> bool:
    """One optimizer step over one global batch. True if a stop was requested."""
    done = _compute(job, step, batches)
    if done.finite:
        with memory.oom_context(job, step, "optimizer step"):
            job.engine.step(done.lr)
    job.engine.zero_grad()
    _check_finite(job, step, done)
    _record(job, step, done)
    job.checkpoints.check()
    return done.stop


def _compute(job: Job, step: int, batches: Iterator[list[Batch]]) -> _Step:
    """The clipped gradients of one global batch, and its sums over all ranks."""
    mesh = job.mesh
    beat("waiting for data", step + 1)
    begin = time.perf_counter()
    micro_batches = next(batches)
    data_wait = time.perf_counter() - begin

    beat("counting the batch")
    units, _ = mesh.sum(sum(batch.units for batch in micro_batches))
    agreed = time.perf_counter()
    started = DeviceTimestamp(mesh.device)
    micro_batches, losses = _accumulate(job, step, micro_batches, units)
    synced = DeviceTimestamp(mesh.device)
    beat("optimizer step")
    with memory.oom_context(job, step, "optimizer step"):
        grad_norm = job.engine.clip_(job.recipe.training.max_grad_norm, job.scale.value)
    local = float(sum(losses))
    waiting = time.perf_counter()
    amounts = _amounts(micro_batches)
    total, samples, *sums, stop = mesh.sum(
        local,
        sum(len(b.ids) for b in micro_batches),
        *amounts.values(),
        everyone=job.observer.stop_requested(),
    )
    answered = time.perf_counter()
    return _Step(
        micro_batches,
        losses,
        loss=total / units,
        grad_norm=grad_norm,
        lr=learning_rate(job.recipe.training, step, job.steps),
        samples=int(samples),
        amounts=dict(zip(amounts, sums, strict=True)),
        stop=stop > 0,
        begin=begin,
        data_wait=data_wait,
        skew=(agreed - begin - data_wait) + (answered - waiting) if mesh.world > 1 else 0.0,
        started=started,
        synced=synced,
    )


def _record(job: Job, step: int, done: _Step) -> None:
    """The step's line in the metrics, after its optimizer has stepped."""
    ready = job.engine.ready() or done.synced
    exposed = max(0.0, ready.until(done.synced))
    job.observer.step(
        StepRecord(
            step=step + 1,
            epoch=job.loader.plan.epoch_of(step),
            loss=done.loss,
            grad_norm=done.grad_norm,
            lr=done.lr,
            samples=done.samples,
            step_time_s=time.perf_counter() - done.begin,
            data_wait_s=done.data_wait,
            comm_wait_s=exposed + done.skew,
            compute_s=max(0.0, done.started.until(done.synced) - exposed),
            filled=sum(b.filled for b in done.batches),
            cells=sum(b.cells for b in done.batches),
            amounts=done.amounts,
            skipped=not done.finite,
            profiled=job.profile.covers(step),
        ),
        job.mesh,
    )


def _accumulate(
    job: Job, step: int, batches: list[Batch], units: float
) -> tuple[list[Batch], list[Tensor]]:
    """The gradients of the global batch; the loss is divided once, by all of its units. Returns the
    micro-batches, which are smaller than `batches` where those did not fit, and their losses."""
    functions = replace(job.functions, scale=job.scale.value / units)
    while True:
        seed_step(job.recipe.seed, step, job.mesh.rank)
        try:
            return batches, job.engine.accumulate(batches, functions)
        except Exception as error:
            memory.shrink_or_raise(job, step, error)
        memory.recover(job)
        batches = job.loader.micro_batches(step)


def _check_finite(job: Job, step: int, done: _Step) -> None:
    """All ranks see the same loss and norm, so all of them skip the same step, or none does."""
    overflow = job.scale.update(done.finite)
    if done.finite:
        job.bad_steps = 0
        return
    if overflow:
        log.info("step %d: float16 overflow; the loss scale is now %g", step + 1, job.scale.value)
        return
    job.bad_steps += 1
    suspects = [  # ranks without the loss have none
        i
        for b, loss in zip(done.batches, done.losses, strict=False)
        if not math.isfinite(loss)
        for i in b.ids
    ]
    rows = [i for ids in job.mesh.gather(suspects) for i in ids]
    if not rows:  # finite losses, but a gradient is not
        rows = job.loader.plan.batch(step).tolist()
    names = ", ".join(job.loader.source.name(i) for i in rows[:16]) + (
        " …" if len(rows) > 16 else ""
    )
    log.warning(
        "step %d skipped: non-finite loss or gradient; the micro-batch held %s", step + 1, names
    )
    if job.bad_steps >= job.recipe.training.max_bad_steps:
        raise DataError(
            f"the loss or gradient was not finite in {job.bad_steps} steps in a row, last at step {step + 1} "
            f"with {names}; look at those rows, lower training.lr, or raise training.max_bad_steps"
        )


def sync_buffers(job: Job) -> None:
    """Broadcast rank 0's buffers (running statistics) before they are used or saved."""
    if job.mesh.world > 1 and not job.recipe.distributed.sync_batchnorm:
        for part in job.engine.parts:
            for buffer in part.buffers():
                dist.broadcast(buffer, 0)


def score(job: Job, done: int, *splits: Split) -> Evaluation | None:
    """The scores after `done` steps, on the first of `splits` that has data; also logged."""
    sync_buffers(job)
    with memory.oom_context(job, done - 1, "evaluation"):
        for split in splits:
            found = evaluate(
                job.task,
                job.engine,
                split,
                job.mesh,
                job.evaluation_batch,
                lambda: autocast(job.precision, job.mesh.device),
            )
            if found is not None:
                job.observer.evaluation(done, found.split, found.scores)
                return found
    return None


def _save(job: Job, done: int) -> None:
    sync_buffers(job)
    trainer = {"bad_steps": job.bad_steps, "scale": job.scale.state()}
    with memory.oom_context(job, done - 1, "save"):
        stall = job.checkpoints.save(done, job.engine, trainer)
    job.observer.event("checkpoint", step=done, stall_s=stall)


def _due(done: int, every: int | None) -> bool:
    return every is not None and done % every == 0


def _amounts(batches: Sequence[Batch]) -> dict[str, float]:
    names = {name for batch in batches for name in batch.amounts}
    return {name: sum(batch.amounts.get(name, 0.0) for batch in batches) for name in sorted(names)}
