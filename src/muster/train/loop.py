"""The training loop: one clock of optimizer steps, the same maths on any layout."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from muster.data.corpus import Split
from muster.data.loader import Batch, Loader
from muster.errors import DataError
from muster.observe.heartbeat import beat
from muster.observe.observer import Observer, StepRecord
from muster.observe.profile import Profile
from muster.parallel.engine import Engine, Work
from muster.parallel.mesh import Mesh
from muster.parallel.timing import Moment
from muster.recipe.schema import Recipe
from muster.tasks.base import Task
from muster.train import memory
from muster.train.checkpoint import Checkpoints
from muster.train.evaluate import Evaluation, evaluate
from muster.train.optimizer import learning_rate, seed_step
from muster.train.precision import LossScale, autocast

log = logging.getLogger(__name__)

MOST_EVALUATED = 32


@dataclass
class Job:
    """Everything one rank needs to train."""

    recipe: Recipe
    task: Task
    engine: Engine
    mesh: Mesh
    loader: Loader
    checkpoints: Checkpoints
    observer: Observer
    precision: str
    steps: int
    start: int = 0  # completed steps; also the place in the data
    bad_steps: int = 0  # in a row
    scale: LossScale = field(default_factory=LossScale)
    profile: Profile = field(default_factory=Profile)
    held: list[int] = field(default_factory=list)  # samples of the micro-batch last begun

    @property
    def evaluation_batch(self) -> int:
        """As many samples as training holds at a time, where the recipe leaves it open."""
        asked = self.recipe.evaluation.batch_size
        slots = self.loader.ranks * self.loader.accumulation
        held = math.ceil(self.recipe.training.global_batch_size / slots)
        return asked if isinstance(asked, int) else min(MOST_EVALUATED, held)

    @cached_property
    def work(self) -> Work:
        """The task, as the engine sees it."""
        compiled = self.recipe.training.compile and self.mesh.layout.tensor == 1
        return Work(
            prepare=self._prepare,
            inputs=self.task.inputs,
            loss=torch.compile(self.task.loss) if compiled else self.task.loss,
            autocast=lambda: autocast(self.precision, self.mesh.device),
        )

    def _prepare(self, batch: Batch) -> Batch:
        beat("forward and backward")
        self.held = batch.ids
        return self.task.prepare(batch.to(self.mesh.device))


def train(job: Job) -> int:
    """From `job.start` to `job.steps` optimizer steps, or until asked to stop. Returns steps done."""
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


def _step(job: Job, step: int, batches: Iterator[list[Batch]]) -> bool:
    """One optimizer step over one global batch. True when someone asked the run to stop."""
    recipe, mesh, engine = job.recipe, job.mesh, job.engine
    beat("waiting for data", step + 1)
    begin = time.perf_counter()
    micro_batches = next(batches)
    data_wait = time.perf_counter() - begin

    beat("counting the batch")
    units, _ = mesh.sum(sum(batch.units for batch in micro_batches))
    agreed = time.perf_counter()
    started = Moment(mesh.device)
    micro_batches, losses = _accumulate(job, step, micro_batches, units)
    synced = Moment(mesh.device)
    beat("optimizer step")
    with memory.explained(job, step, "optimizer step"):
        grad_norm = engine.clip_(recipe.training.max_grad_norm, job.scale.value)
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
    loss = total / units

    lr = learning_rate(recipe.training, step, job.steps)
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    if finite:
        with memory.explained(job, step, "optimizer step"):
            engine.step(lr)
    engine.zero_grad()
    _judge(job, step, finite, micro_batches, losses)

    ready = engine.ready() or synced
    exposed = max(0.0, ready.until(synced))
    skew = (agreed - begin - data_wait) + (answered - waiting) if mesh.world > 1 else 0.0
    job.observer.step(
        StepRecord(
            step=step + 1,
            epoch=job.loader.plan.epoch_of(step),
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            samples=int(samples),
            step_time_s=time.perf_counter() - begin,
            data_wait_s=data_wait,
            comm_wait_s=exposed + skew,
            compute_s=max(0.0, started.until(synced) - exposed),
            filled=sum(b.filled for b in micro_batches),
            cells=sum(b.cells for b in micro_batches),
            amounts=dict(zip(amounts, sums, strict=True)),
            skipped=not finite,
            profiled=job.profile.covers(step),
        ),
        mesh,
    )
    job.checkpoints.check()
    return stop > 0


def _accumulate(
    job: Job, step: int, batches: list[Batch], units: float
) -> tuple[list[Batch], list[Tensor]]:
    """The gradients of the global batch; the loss is divided once, by all of its units. Returns the
    micro-batches, which are smaller than `batches` where those had no room, and their losses."""
    work = replace(job.work, scale=job.scale.value / units)
    while True:
        seed_step(job.recipe.seed, step, job.mesh.rank)
        try:
            return batches, job.engine.accumulate(batches, work)
        except Exception as error:
            memory.make_room(job, step, error)
        memory.recover(job)
        batches = job.loader.micro_batches(step)


def _judge(
    job: Job, step: int, finite: bool, batches: Sequence[Batch], losses: Sequence[Tensor]
) -> None:
    """All ranks see the same loss and norm, so all of them skip the same step, or none does."""
    overflow = job.scale.update(finite)
    if finite:
        job.bad_steps = 0
        return
    if overflow:
        log.info("step %d: float16 overflow; the loss scale is now %g", step + 1, job.scale.value)
        return
    job.bad_steps += 1
    suspects = [  # ranks that hold no loss name no suspects
        i
        for b, loss in zip(batches, losses, strict=False)
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


def agree_on_buffers(job: Job) -> None:
    """Statistics that each rank kept for itself, settled on rank 0's before they are used or saved."""
    if job.mesh.world > 1 and not job.recipe.distributed.sync_batchnorm:
        for part in job.engine.parts:
            for buffer in part.buffers():
                dist.broadcast(buffer, 0)


def score(job: Job, done: int, *splits: Split) -> Evaluation | None:
    """The scores after `done` steps, on the first of `splits` that has data; recorded as well."""
    agree_on_buffers(job)
    with memory.explained(job, done - 1, "evaluation"):
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
    agree_on_buffers(job)
    trainer = {"bad_steps": job.bad_steps, "scale": job.scale.state()}
    with memory.explained(job, done - 1, "save"):
        stall = job.checkpoints.save(done, job.engine, trainer)
    job.observer.event("checkpoint", step=done, stall_s=stall)


def _due(done: int, every: int | None) -> bool:
    return every is not None and done % every == 0


def _amounts(batches: Sequence[Batch]) -> dict[str, float]:
    names = {name for batch in batches for name in batch.amounts}
    return {name: sum(batch.amounts.get(name, 0.0) for batch in batches) for name in sorted(names)}
