"""Before the first step: the costliest micro-batch is tried, and `auto` settings that a run can only
measure are decided.

`training.compile: auto` is given up where compilation fails, and `training.cuda_graphs: auto` is
taken where a trial shows that it is faster.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import torch
from torch.nn.parallel import DistributedDataParallel

from muster.auto import AutoChoice
from muster.data.loader import Batch
from muster.errors import StartAgain
from muster.observe.choices import write_choices
from muster.observe.heartbeat import beat, current_phase
from muster.observe.memory import out_of_memory
from muster.parallel import compilation, state
from muster.parallel.conflicts import no_graphs
from muster.parallel.engine import TorchEngine
from muster.parallel.graphs import GRAPH_MEMORY, Graphs
from muster.parallel.timestamps import DeviceTimestamp
from muster.training import memory
from muster.training.job import Job

log = logging.getLogger(__name__)

COMPILING = "compiling"
TRIALS = 5  # passes that are timed
WORTH_REPLAYING = 0.985  # of the time of launched kernels


def warm_up(job: Job) -> None:
    """Compute the gradients of the costliest micro-batch and discard them, so that out of memory, and a
    failure of compilation, show now. Weights, buffers, random state and the position in the data do not
    change.

    On CPUs this is needed only in a resumed run: DDP rebuilds its buckets after its first backward
    pass, and with other buckets three ranks or more sum in another order.
    """
    on_gpu, engine = job.mesh.device.type == "cuda", job.engine
    if job.compiled:
        _tell_compilation()
    ddp = isinstance(engine, TorchEngine) and isinstance(engine.module, DistributedDataParallel)
    needed = on_gpu or job.recipe.training.on_oom == "shrink" or (ddp and job.start > 0)
    if job.start == job.steps or not needed:
        return
    if isinstance(engine, TorchEngine):
        state.init_optimizer_state(engine.optimizer)  # as in every step but the first
    job.buffers.keep()
    _try_costliest(job)
    if on_gpu and isinstance(engine, TorchEngine):
        _choose_graphs(job, engine)
    job.buffers.restore()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(job.mesh.device)  # what was only tried needed more


@cache
def _tell_compilation() -> None:
    """It may take minutes, in which this rank is not stalled. Evaluations and optimizers are compiled too."""
    interrupted = "forward and backward"

    def begins() -> None:
        nonlocal interrupted
        if (phase := current_phase()) not in (None, COMPILING):
            interrupted = str(phase)
        beat(COMPILING)

    compilation.tell_compilation(begins=begins, ends=lambda: beat(interrupted))


def _try_costliest(job: Job) -> None:
    """Until it fits."""
    # The shape that is compiled first, also after a resume.
    start = 0 if job.compiled else job.start
    step, done = job.loader.costliest(start, job.steps), False
    while not done:
        batches = job.loader.micro_batches(step)
        if job.mesh.layout.pipeline == 1:
            batches = [max(batches, key=lambda batch: batch.cells)]
        try:
            _gradients(job, batches)
            done = True
        except Exception as error:
            if not gave_up_compiling(job, error):
                memory.shrink_or_raise(job, step, error, ahead=True)
        memory.recover(job)


def gave_up_compiling(job: Job, error: Exception) -> bool:
    """Whether what ended with `error` shall be repeated, uncompiled from now on. Several ranks start again:
    the others already wait for this one in a collective."""
    if not (job.compiled and job.choices["compile"].optional):
        return False
    if out_of_memory(error) or not compilation.is_compiler_error(error):
        return False
    reason = compilation.summary(error)
    log.warning("training.compile: it failed, and the run goes on uncompiled (%s)", reason)
    job.choices["compile"] = AutoChoice(False, f"it failed ({reason})")
    if job.mesh.world > 1:
        write_choices(job.observer.folder, job.choices)
        raise StartAgain(
            f"training.compile: {reason}; after the restart, nothing is compiled"
        ) from error
    compilation.run_uncompiled()
    job.observer.choices(job.choices)
    return True


def _gradients(job: Job, batches: Sequence[Batch]) -> None:
    units = max(1, sum(batch.units for batch in batches))
    job.engine.accumulate(batches, replace(job.functions, scale=1 / units))


def _choose_graphs(job: Job, engine: TorchEngine) -> None:
    """As at the first start of the run, which tried it."""
    asked, chosen = job.recipe.training.cuda_graphs, job.choices.get("cuda_graphs")
    if asked != "auto":
        chosen = AutoChoice.forced(asked)
    elif problem := no_graphs(job.recipe, job.mesh.layout, job.task.facts.captures) or _no_trial(
        job
    ):
        chosen = AutoChoice.forced(False, problem)
    elif chosen is None:
        chosen = _try_graphs(job, engine)
    job.choices["cuda_graphs"] = chosen
    if chosen.used:
        failed = partial(_note_failed_capture, job) if chosen.optional else None
        engine.replay(_graphs(job, engine, failed))


def _graphs(job: Job, engine: TorchEngine, failed: Callable[[str], None] | None) -> Graphs:
    return Graphs(job.mesh.device, engine.parts[0].parameters(), failed)


def _no_trial(job: Job) -> str | None:
    if job.mesh.world > 1:
        return "with several ranks, only where the recipe asks for them"
    if (used := _memory_share(job)) > GRAPH_MEMORY:
        return f"{used:.0%} of the memory is in use, and graphs need as much again"
    return None


def _note_failed_capture(job: Job, reason: str) -> None:
    job.choices["cuda_graphs"] = AutoChoice(False, reason)
    job.observer.choices(job.choices)


def _try_graphs(job: Job, engine: TorchEngine) -> AutoChoice:
    """The same micro-batch, of median length, launched kernel by kernel and replayed."""
    batches = job.loader.micro_batches(job.loader.median(job.start, job.steps))[:1]
    while True:
        problems: list[str] = []
        try:
            plain = _seconds(job, batches)
            engine.graphs = _graphs(job, engine, problems.append)
            replayed = _seconds(job, batches)
            break
        except Exception as error:
            if out_of_memory(error):
                return AutoChoice.forced(False, "out of memory in the trial")
            if not gave_up_compiling(job, error):
                raise
        finally:
            engine.graphs = None
            memory.recover(job)
    if problems:
        return AutoChoice(False, problems[0])
    words = (
        f"a micro-batch takes {1e3 * replayed:.1f} ms replayed and {1e3 * plain:.1f} ms launched"
    )
    return AutoChoice(replayed < WORTH_REPLAYING * plain, words)


def _seconds(job: Job, batches: Sequence[Batch]) -> float:
    """Of the quickest pass over `batches`, once their shapes are compiled and captured."""
    for _ in range(2):
        _gradients(job, batches)
    gc.collect()
    gc.disable()  # as in the loop
    try:
        marks = [DeviceTimestamp(job.mesh.device)]
        for _ in range(TRIALS):
            if job.loader.accumulation == 1:
                job.engine.zero_grad()  # as in every step
            _gradients(job, batches)
            marks.append(DeviceTimestamp(job.mesh.device))
        return min(begin.until(end) for begin, end in pairwise(marks))
    finally:
        gc.enable()


def _memory_share(job: Job) -> float:
    total = torch.cuda.get_device_properties(job.mesh.device).total_memory
    return torch.cuda.max_memory_allocated(job.mesh.device) * job.mesh.ranks_per_gpu / total
