"""The training loop: counts optimizer steps, and computes the same on any layout."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from muster.data.corpus import Split
from muster.data.loader import Batch
from muster.errors import DataError
from muster.observe.heartbeat import beat
from muster.observe.observer import StepRecord
from muster.parallel.gradients import clip_divisor
from muster.parallel.timestamps import DeviceTimestamp
from muster.train import memory
from muster.train.evaluate import Evaluation, evaluate
from muster.train.job import Job
from muster.train.optimizer import learning_rate, seed_step
from muster.train.precision import autocast
from muster.train.warm_up import gave_up_compiling, warm_up

log = logging.getLogger(__name__)

COLLECT_EVERY = 50  # steps between collections of garbage; they take milliseconds


def train(job: Job) -> int:
    """From `job.start` to `job.steps` optimizer steps, or until a stop is requested. Returns steps done."""
    for part in job.engine.parts:
        part.train()
    warm_up(job)
    if job.mesh.device.type == "cuda":
        job.observer.choices(job.choices)
    done, saving, late = job.start, job.recipe.checkpoint, _reads_late(job)
    batches = job.loader.steps(job.start, job.steps)
    unread: _Step | None = None
    before: _Step | None = None  # if nothing else happened since
    with _collected_between_steps():
        for step in range(job.start, job.steps):
            job.profile.begin(step, job.mesh)
            if step > job.start and job.profile.covers(step - 1):
                before = None
            try:
                before = launched = _launch(job, step, batches, before)
            except Exception:
                _keep_line(job, unread)
                raise
            if unread is not None:
                _read(job, unread)
            unread, done = launched, step + 1
            last = done == job.steps or launched.stop
            evaluates = _due(done, job.recipe.evaluation.every_steps) and not last
            saves = _due(done, saving.every_steps) or launched.stop or (last and saving.final)
            if last or evaluates or saves or not late:
                _read(job, unread)
                unread = None
            if evaluates:
                score(job, done, "validation")
            if saves:
                _save(job, done)
            if evaluates or saves:
                before = None
                gc.collect()
            elif done % COLLECT_EVERY == 0:
                gc.collect(1)
            if last:
                break
    job.profile.end(job.mesh)
    batches.close()  # type: ignore[attr-defined]
    job.observer.flush(job.mesh)
    job.checkpoints.wait()
    return done


def _keep_line(job: Job, unread: _Step | None) -> None:
    """The metrics of a step that was not read yet when the next one failed; without the other ranks, which
    may not have failed."""
    if unread is not None:
        with suppress(Exception):  # the device may be gone
            job.observer.write(_record(job, unread))


def _reads_late(job: Job) -> bool:
    """Whether a step's results are read after the next step was launched, so that a GPU always has work
    queued. The loss scale of float16 depends on the step before."""
    return job.mesh.device.type == "cuda" and not job.scale.dynamic


@contextmanager
def _collected_between_steps() -> Iterator[None]:
    """Python's garbage collector would stop one rank in the middle of a step, and the others with it."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@dataclass
class _Step:
    """One optimizer step that was launched: its results on the device, and when its parts were reached."""

    step: int  # counted from 0
    ids: list[list[int]]  # samples of each micro-batch
    losses: list[Tensor]  # of each micro-batch
    results: Tensor  # mean loss of the global batch and gradient norm: on the host, once at `end`
    lr: float
    samples: int
    amounts: dict[str, float]
    filled: int
    cells: int
    stop: bool  # a stop was requested
    begin: DeviceTimestamp  # the end of the step before
    waiting: DeviceTimestamp  # for data
    loaded: DeviceTimestamp
    agreed: DeviceTimestamp  # all ranks have loaded their data
    ready: DeviceTimestamp  # this rank's gradients are computed
    synced: DeviceTimestamp  # those of all ranks are summed
    summed: DeviceTimestamp  # and their losses
    end: DeviceTimestamp


def _launch(job: Job, step: int, batches: Iterator[list[Batch]], before: _Step | None) -> _Step:
    """One optimizer step over one global batch. `before`: the step that ended when this one began."""
    mesh, training = job.mesh, job.recipe.training
    beat("waiting for data", step + 1)
    waiting = DeviceTimestamp(mesh.device)
    micro_batches = next(batches)
    loaded = DeviceTimestamp(mesh.device)

    beat("counting the batch")
    amounts = _amounts(micro_batches)
    units, samples, *sums, stop = mesh.sum(
        sum(batch.units for batch in micro_batches),
        sum(len(b.ids) for b in micro_batches),
        *amounts.values(),
        everyone=job.observer.stop_requested(),
    )
    agreed = DeviceTimestamp(mesh.device)
    micro_batches, losses = _accumulate(job, step, micro_batches, units)
    synced = DeviceTimestamp(mesh.device)
    ready = job.engine.ready() or synced

    beat("optimizer step")
    loss = mesh.total(sum(losses, torch.zeros((), device=mesh.device))) / units
    summed = DeviceTimestamp(mesh.device)
    lr = learning_rate(training, step, job.steps)
    with memory.oom_context(job, step, "optimizer step"):
        norm = job.engine.grad_norm(job.scale.value)
        divisor = clip_divisor(norm, training.max_grad_norm, job.scale.value)
        job.engine.step(lr, divisor, loss.isfinite() & norm.isfinite())
    job.engine.zero_grad()
    return _Step(
        step,
        [batch.ids for batch in micro_batches],
        losses,
        _to_host(torch.stack([loss, norm.to(loss.device)])),
        lr,
        samples=int(samples),
        amounts=dict(zip(amounts, sums, strict=True)),
        filled=sum(b.filled for b in micro_batches),
        cells=sum(b.cells for b in micro_batches),
        stop=stop > 0,
        begin=before.end if before else waiting,
        waiting=waiting,
        loaded=loaded,
        agreed=agreed,
        ready=ready,
        synced=synced,
        summed=summed,
        end=DeviceTimestamp(mesh.device),
    )


def _read(job: Job, launched: _Step) -> None:
    """Wait for the step's results: its line in the metrics, and what was not finite."""
    beat("waiting for the device")
    record = _record(job, launched)
    job.observer.step(record, job.mesh)
    _check_finite(job, launched, not record.skipped)
    job.checkpoints.check()


def _record(job: Job, launched: _Step) -> StepRecord:
    step_time = launched.begin.until(launched.end)  # from here on the results are on the host
    step, (loss, grad_norm) = launched.step, launched.results.tolist()
    exposed = waited = 0.0
    if job.mesh.world > 1:
        exposed = max(0.0, launched.ready.until(launched.synced))
        waited = launched.loaded.until(launched.agreed) + launched.synced.until(launched.summed)
    return StepRecord(
        step=step + 1,
        epoch=job.loader.plan.epoch_of(step),
        loss=loss,
        grad_norm=grad_norm,
        lr=launched.lr,
        samples=launched.samples,
        step_time_s=step_time,
        data_wait_s=launched.waiting.until(launched.loaded),
        comm_wait_s=exposed + waited,
        compute_s=max(0.0, launched.agreed.until(launched.synced) - exposed),
        filled=launched.filled,
        cells=launched.cells,
        amounts=launched.amounts,
        skipped=not (math.isfinite(loss) and math.isfinite(grad_norm)),
        profiled=job.profile.covers(step),
    )


def _to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, complete when the device gets there."""
    if tensor.device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


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
            if not gave_up_compiling(job, error):
                memory.shrink_or_raise(job, step, error)
        memory.recover(job)
        batches = job.loader.micro_batches(step)


def _check_finite(job: Job, launched: _Step, finite: bool) -> None:
    """All ranks see the same loss and norm, so all of them skip the same step, or none does."""
    step, overflow = launched.step, job.scale.update(finite)
    if finite:
        job.bad_steps = 0
        return
    if overflow:
        log.info("step %d: float16 overflow; the loss scale is now %g", step + 1, job.scale.value)
        return
    job.bad_steps += 1
    suspects = [  # ranks without the loss have none
        i
        for ids, loss in zip(launched.ids, launched.losses, strict=False)
        if not math.isfinite(loss)
        for i in ids
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
