"""The results of an optimizer step, read once the device has computed them."""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from muster.errors import DataError
from muster.observe.heartbeat import beat
from muster.observe.observer import StepRecord
from muster.parallel.timestamps import DeviceTimestamp
from muster.training.job import Job
from muster.training.rewind import rewind
from muster.training.spikes import Limits

log = logging.getLogger(__name__)


@dataclass
class Launched:
    """One optimizer step that was launched: its results on the device, and when its parts were reached."""

    step: int  # counted from 0
    ids: list[list[int]]  # samples of each micro-batch
    losses: list[Tensor]  # of each micro-batch
    results: Tensor  # mean loss of the global batch, gradient norm, whether both are within `limits`: on the host, once at `end`
    limits: Limits
    lr: float
    left_out: bool  # by a rewind: nothing was computed
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


def read(job: Job, launched: Launched) -> None:
    """Wait for the step's results: its line in the metrics, and what was not finite."""
    beat("waiting for the device")
    record = _record(job, launched)
    job.observer.step(record, job.mesh)
    if not launched.left_out:
        _judge(job, launched, record)
    job.checkpoints.check()


def _record(job: Job, launched: Launched) -> StepRecord:
    step_time = launched.begin.until(launched.end)  # from here on the results are on the host
    step, (loss, grad_norm, within) = launched.step, launched.results.tolist()
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    applied = within or (finite and job.recipe.training.on_spike == "continue")
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
        skipped=not launched.left_out and not applied,
        left_out=launched.left_out,
        profiled=job.profile.covers(step),
    )


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, complete when the device gets there."""
    if tensor.device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def keep_line(job: Job, unread: Launched | None) -> None:
    """The metrics of a step that was not read yet when the next one failed; without the other ranks, which
    may not have failed."""
    if unread is not None:
        with suppress(Exception):  # the device may be gone
            job.observer.write(_record(job, unread))


def _judge(job: Job, launched: Launched, record: StepRecord) -> None:
    """All ranks see the same loss and norm, so all of them skip the same step, or none does."""
    finite = math.isfinite(record.loss) and math.isfinite(record.grad_norm)
    if job.scale.update(finite):
        log.info(
            "step %d: float16 overflow; the loss scale is now %g", record.step, job.scale.value
        )
        return
    job.bad_steps = 0 if finite else job.bad_steps + 1
    job.spikes.add(launched.step, record.loss, record.grad_norm, launched.limits)
    if launched.results[2]:
        return
    names = _names(job, launched)
    if not finite:
        log.warning(
            "step %d skipped: non-finite loss or gradient; the micro-batch held %s",
            record.step,
            names,
        )
    _spike(job, launched, record, names)
    if job.bad_steps >= job.recipe.training.max_bad_steps:
        job.checkpoints.wait()
        raise DataError(
            f"the loss or gradient was not finite in {job.bad_steps} steps in a row, last at step {record.step} "
            f"with {names}, and {job.checkpoints.newest_complete()}; look at those rows, lower training.lr, or raise "
            "training.max_bad_steps"
        )


def _names(job: Job, launched: Launched) -> str:
    """Rows of the micro-batches whose loss is not finite; of the whole batch where each of them is."""
    suspects = [  # ranks without the loss have none
        i
        for ids, loss in zip(launched.ids, launched.losses, strict=False)
        if not math.isfinite(loss)
        for i in ids
    ]
    rows = [i for ids in job.mesh.gather(suspects) for i in ids]
    if not rows:
        rows = job.loader.plan.batch(launched.step).tolist()
    source = job.loader.source_at(launched.step)
    return ", ".join(source.name(i) for i in rows[:16]) + (" …" if len(rows) > 16 else "")


def _spike(job: Job, launched: Launched, record: StepRecord, names: str) -> None:
    """Told, and answered as `training.on_spike` says."""
    answer, limits = job.recipe.training.on_spike, launched.limits
    over = [] if record.loss <= limits.loss else ["the loss"]
    over += [] if record.grad_norm <= limits.grad_norm else ["the gradient norm"]
    words = (
        f"{' and '.join(over)} {'spike' if len(over) > 1 else 'spikes'} at step {record.step}: "
        f"loss {record.loss:.4g} (limit {limits.loss:.4g}), gradient norm "
        f"{record.grad_norm:.4g} (limit {limits.grad_norm:.4g}), with {names}"
    )
    job.observer.event(
        "spike",
        step=record.step,
        **{name: value for name, value in _numbers(record, limits) if math.isfinite(value)},
        skipped=record.skipped,
        answer=answer,
        words=words,
    )
    if answer == "stop":
        job.checkpoints.wait()
        raise DataError(
            f"{words}; training.on_spike=stop ends the run, and {job.checkpoints.newest_complete()}; look at those "
            "rows, or go on from there with training.on_spike=skip or rewind, a lower training.lr, or a higher "
            "training.spike_deviations"
        )
    if answer == "rewind":
        rewind(job, record.step, words)


def _numbers(record: StepRecord, limits: Limits) -> list[tuple[str, float]]:
    return [
        ("loss", record.loss),
        ("loss_limit", limits.loss),
        ("grad_norm", record.grad_norm),
        ("grad_norm_limit", limits.grad_norm),
    ]
