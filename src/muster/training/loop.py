"""The training loop: counts optimizer steps, and computes the same on any layout."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.data.corpus import Split
from muster.data.loader import Batch
from muster.errors import StartAgain
from muster.observe.heartbeat import beat
from muster.parallel.device_test import verify_device
from muster.parallel.gradients import clip_divisor
from muster.parallel.timestamps import DeviceTimestamp
from muster.training import memory
from muster.training.evaluate import Evaluation, evaluate
from muster.training.job import Job
from muster.training.optimizer import learning_rate, seed_step
from muster.training.precision import autocast
from muster.training.replicas import compare
from muster.training.spikes import Limits
from muster.training.step_results import Launched, keep_line, read, to_host
from muster.training.warm_up import gave_up_compiling, warm_up

COLLECT_EVERY = 50  # steps between collections of garbage; they take milliseconds


def train(job: Job) -> int:
    """From `job.start` to `job.steps` optimizer steps, or until a stop is requested, or the validation
    score no longer improves. Returns steps done."""
    for part in job.engine.parts:
        part.train()
    if job.owes_evaluation:
        validate(job, job.start)
    if job.ended_early:
        return job.start
    warm_up(job)
    if job.mesh.device.type == "cuda":
        job.observer.choices(job.choices)
    done, saving, late = job.start, job.recipe.checkpoint, _reads_late(job)
    batches = job.loader.steps(job.start, job.steps)
    unread: Launched | None = None
    before: Launched | None = None  # if nothing else happened since
    with _collected_between_steps():
        for step in range(job.start, job.steps):
            job.profile.begin(step, job.mesh)
            if step > job.start and job.profile.covers(step - 1):
                before = None
            try:
                before = launched = _launch(job, step, batches, before)
            except Exception:
                keep_line(job, unread)
                raise
            if unread is not None:
                read(job, unread)
            unread, done = launched, step + 1
            last = done == job.steps or launched.stop
            evaluates, saves = _evaluates(job, done, last), _due(done, saving.every_steps)
            compares, tests = (
                _due(done, saving.verify_steps),
                _due(done, saving.verify_device_steps),
            )
            if last or evaluates or saves or compares or tests or not late:
                read(job, unread)
                unread = None
            if tests:
                _test_device(job, done)
            best = evaluates and validate(job, done)
            last = last or job.ended_early
            saves = saves or launched.stop or (last and saving.final)
            if saves or best:
                _save(job, done, only_best=not saves, required=last)
            elif compares:
                _compare(job, done)
            if saves and not last:
                _start_again_if_asked(job, done)
            if evaluates or saves or compares or tests:
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


def _launch(
    job: Job, step: int, batches: Iterator[list[Batch]], before: Launched | None
) -> Launched:
    """One optimizer step over one global batch. `before`: the step that ended when this one began."""
    mesh = job.mesh
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
    left_out, limits = job.leaves_out(step), job.spikes.limits(step)
    if left_out:
        losses, ready, synced, summed = list[Tensor](), agreed, agreed, agreed
        results = torch.tensor([math.nan, math.nan, 0.0])
    else:
        micro_batches, losses = _accumulate(job, step, micro_batches, units)
        synced = DeviceTimestamp(mesh.device)
        ready = job.engine.ready() or synced
        beat("optimizer step")
        loss = mesh.total(sum(losses, torch.zeros((), device=mesh.device))) / units
        summed = DeviceTimestamp(mesh.device)
        results = to_host(_update(job, step, loss, limits))
    return Launched(
        step,
        [batch.ids for batch in micro_batches],
        losses,
        results,
        limits,
        learning_rate(job.recipe.training, step, job.steps),
        left_out,
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


def _update(job: Job, step: int, loss: Tensor, limits: Limits) -> Tensor:
    """The optimizer's step, unless it is to be skipped, which is decided on the device. Returns the loss, the
    gradient norm, and whether both are finite and within the limits."""
    training = job.recipe.training
    with memory.oom_context(job, step, "optimizer step"):
        norm = job.engine.grad_norm(job.scale.value).to(loss.device)
        divisor = clip_divisor(norm, training.max_grad_norm, job.scale.value)
        finite = loss.isfinite() & norm.isfinite()
        within = finite & (loss <= limits.loss) & (norm <= limits.grad_norm)
        if job.mixed:  # ranks may differ in the last bit of what they computed alone
            within = job.mesh.every_rank(within)
        lr = learning_rate(training, step, job.steps)
        applied = finite if training.on_spike == "continue" else within
        job.engine.step(lr, divisor, applied)
        job.buffers.restore(unless=applied)
    job.engine.zero_grad()
    return torch.stack([loss, norm, within.to(norm.dtype)])


def _accumulate(
    job: Job, step: int, batches: list[Batch], units: float
) -> tuple[list[Batch], list[Tensor]]:
    """The gradients of the global batch; the loss is divided once, by all of its units. Returns the
    micro-batches, which are smaller than `batches` where those did not fit, and their losses."""
    functions = replace(job.functions, scale=job.scale.value / units)
    job.buffers.keep()
    while True:
        seed_step(job.recipe.seed, step, job.mesh.rank)
        try:
            return batches, job.engine.accumulate(batches, functions)
        except Exception as error:
            if not gave_up_compiling(job, error):
                memory.shrink_or_raise(job, step, error)
        memory.recover(job)
        job.buffers.restore()
        batches = job.loader.micro_batches(step)


def sync_buffers(job: Job) -> None:
    """Broadcast rank 0's buffers (running statistics) before they are used or saved."""
    if job.mesh.world > 1 and not job.recipe.distributed.sync_batchnorm:
        for part in job.engine.parts:
            for buffer in part.buffers():
                dist.broadcast(buffer, 0)


def score(job: Job, done: int, *splits: Split) -> Evaluation | None:
    """The scores after `done` steps, on the first of `splits` that has data; also logged."""
    found = _evaluate(job, done, *splits)
    if found is not None:
        job.observer.evaluation(done, found.split, found.scores, found.remarks)
    return found


def validate(job: Job, done: int) -> bool:
    """Score the validation data. Whether that is the best so far and is to be kept: all ranks decide by
    the same scores, those of rank 0."""
    found, rule = _evaluate(job, done, "validation"), job.selection
    if found is None:
        return False
    if rule is None:
        job.observer.evaluation(done, found.split, found.scores, found.remarks)
        return False
    best = rule.add(done, job.mesh.gather(found.scores)[0])
    job.validated = {s: e for s, e in job.validated.items() if s == rule.best_step} | {done: found}
    better = rule.better.get(str(rule.metric))
    choice = {"best": best, "metric": rule.metric, "better": better}
    job.observer.evaluation(done, found.split, found.scores, found.remarks, **choice)
    if rule.exhausted and done < job.steps:
        job.observer.event("early_stop", step=done, words=rule.words())
    return best and rule.keeps


def _evaluates(job: Job, done: int, last: bool) -> bool:
    """Where evaluations choose a checkpoint, the last step is one to choose from. A stop does not wait: what
    was due is made up for when the run is resumed."""
    due = _due(done, job.recipe.evaluation.every_steps)
    if job.selection is None:
        return due and not last
    return done == job.steps or (due and not last)


def _evaluate(job: Job, done: int, *splits: Split) -> Evaluation | None:
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
                job.observer.scoring(split, done, at_once=done == job.steps),
            )
            if found is not None:
                return found
    return None


def _save(job: Job, done: int, *, only_best: bool, required: bool) -> None:
    _compare(job, done)
    sync_buffers(job)
    trainer: dict[str, Any] = {"bad_steps": job.bad_steps, "scale": job.scale.state()}
    trainer |= {"spikes": job.spikes.state(), "rewinds": [asdict(one) for one in job.rewinds]}
    if job.selection is not None:
        trainer |= {"selection": job.selection.state(), "only_best": only_best}
    with memory.oom_context(job, done - 1, "save"):
        stall = job.checkpoints.save(done, job.engine, trainer, required=required)
    job.observer.event("checkpoint", step=done, stall_s=stall)


def _compare(job: Job, done: int) -> None:
    with memory.oom_context(job, done - 1, "comparison of replicas"):
        compare(job, done)


def _test_device(job: Job, done: int) -> None:
    beat("testing the device")
    with memory.oom_context(job, done - 1, "test of the device"):
        verify_device(job.mesh)


def _start_again_if_asked(job: Job, done: int) -> None:
    """Nodes wait to take part: once the checkpoint is complete, all ranks end, to start again with them. One
    that the disk did not keep is left to the next."""
    if not job.mesh.gather(job.observer.regroup_requested())[0]:
        return
    job.checkpoints.wait()
    if job.checkpoints.last_saved == done:
        job.observer.flush(job.mesh)
        raise StartAgain(f"more ranks are here; all start again from the checkpoint of step {done}")


def _due(done: int, every: int | None) -> bool:
    return every is not None and done % every == 0


def _amounts(batches: Sequence[Batch]) -> dict[str, float]:
    names = {name for batch in batches for name in batch.amounts}
    return {name: sum(batch.amounts.get(name, 0.0) for batch in batches) for name in sorted(names)}
