"""Out of memory: report rank, phase and rows, and with on_oom=shrink continue with smaller micro-batches.

A single process halves its micro-batch and repeats the step. One of several ranks cannot: the others
already wait for it in a collective. It writes the smaller size to a file and exits, and the
supervisor restarts all ranks from the last checkpoint. The costliest micro-batch runs before the
first step (`muster.training.warm_up`), so that this happens early.
"""

from __future__ import annotations

import gc
import logging
import math
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from muster.errors import MemoryLimitError, MusterError, StartAgain, UnreadableError
from muster.observe.events import write_event
from muster.observe.memory import budget, largest, out_of_memory, wanted
from muster.parallel.engine import TorchEngine
from muster.parallel.mesh import Mesh
from muster.parallel.optimizers.facts import ZERO_OPTIMIZERS
from muster.reading import json_file
from muster.recipe.batch import BatchSizes
from muster.training.job import Job
from muster.writing import write_json

log = logging.getLogger(__name__)

NOTE = "shrink.json"


@contextmanager
def oom_context(job: Job, step: int, phase: str) -> Iterator[None]:
    """Turns an out-of-memory error into MemoryLimitError. `step` counts from 0."""
    try:
        yield
    except MusterError:
        raise
    except Exception as error:
        if not out_of_memory(error):
            raise
        job.current_ids = []  # not of this phase
        description = _describe_oom(job, step, f"step {step + 1}", phase, error)
        raise MemoryLimitError(f"{description} {_remedy(job, phase)}") from error


def shrink_or_raise(job: Job, step: int, error: Exception, *, ahead: bool = False) -> None:
    """After `error` in the gradients of `step`, which may have run `ahead` of the loop: returns if a single
    process can repeat it with a halved micro-batch, else raises."""
    shrinks = job.recipe.training.on_oom == "shrink"
    if not out_of_memory(error) or (isinstance(error, MusterError) and not shrinks):
        raise error
    phase = "backward pass" if _in_backward(error) else "forward pass"
    when = f"step {step + 1}" + (" (tried ahead)" if ahead else "")
    description, smaller = _describe_oom(job, step, when, phase, error), _halved(job)
    if not shrinks or smaller is None:
        raise MemoryLimitError(f"{description} {_remedy(job, phase)}") from error
    plain = isinstance(job.engine, TorchEngine) and job.engine.graphs is None
    single = job.mesh.world == 1 and plain
    note = _write_note(job, step, when, phase, smaller, restart=not single)
    log.warning("%s %s", description, note["words"])
    if not single:
        raise StartAgain(
            f"{description} After the restart, micro-batches have {smaller} sample(s)."
        )
    job.loader.accumulation = note["accumulation"]


def recover(job: Job) -> None:
    """Free the memory of the failed attempt; its exception must no longer be referenced."""
    job.engine.zero_grad()
    gc.collect()
    if job.mesh.device.type == "cuda":
        torch.cuda.empty_cache()


def shrunk_sizes(sizes: BatchSizes, mesh: Mesh, folder: Path, microbatches: int = 1) -> BatchSizes:
    """`sizes`, with the smallest micro-batch that any rank wrote down in this run. A collective call.
    `microbatches`: of a pipeline."""
    notes = [note for note in mesh.gather(_read_note(folder)) if note]
    if not notes:
        return sizes
    note = min(notes, key=lambda note: int(note["per_device"]))
    slots = sizes.data_ranks * microbatches
    wanted = math.ceil(sizes.global_batch / (note["per_device"] * slots))
    accumulation = max(sizes.accumulation, min(wanted, sizes.global_batch // slots))
    if (
        sizes.data_ranks == note["data_ranks"]
        and accumulation * microbatches < note["accumulation"]
    ):
        raise MemoryLimitError(
            f"{note['words']}; but {sizes.global_batch} samples on {sizes.data_ranks} data rank(s) "
            f"cannot be split that far; raise training.global_batch_size, or use fewer ranks"
        )
    per_device = math.ceil(sizes.global_batch / (accumulation * sizes.data_ranks))
    return replace(sizes, per_device=per_device, accumulation=accumulation)


def _read_note(folder: Path) -> dict[str, Any] | None:
    """None too for one that no rank wrote: the run then begins with the micro-batch of its plan."""
    try:
        note = json_file.read(folder / NOTE)
    except (OSError, UnreadableError):
        return None
    counts = [note.get(key) for key in ("per_device", "data_ranks", "accumulation")]
    if not all(type(count) is int and 0 < count < 2**31 for count in counts):
        return None
    return note if isinstance(note.get("words"), str) else None


def _samples(job: Job) -> int:
    """The largest micro-batch of this rank."""
    slots = job.loader.ranks * job.loader.accumulation
    return math.ceil(job.loader.plan.batch_size / slots)


def _halved(job: Job) -> int | None:
    """None where the global batch cannot be split further."""
    finest = job.loader.plan.batch_size // job.loader.ranks
    return math.ceil(_samples(job) / 2) if finest > job.loader.accumulation else None


def _write_note(
    job: Job, step: int, when: str, phase: str, smaller: int, *, restart: bool
) -> dict[str, Any]:
    """For the restart, and as an event."""
    batch, ranks, rank, was = (
        job.loader.plan.batch_size,
        job.loader.ranks,
        job.mesh.rank,
        _samples(job),
    )
    note = {
        "time": time.time(),
        "rank": rank,
        "phase": phase,
        "was": was,
        "per_device": smaller,
        "accumulation": min(math.ceil(batch / (smaller * ranks)), batch // ranks),
        "data_ranks": ranks,
        "rows": [job.loader.source_at(step).name(i) for i in job.current_ids],
        "restart": restart,
        "words": f"out of memory at {when} on rank {rank}: {was} → {smaller} samples at a time",
    }
    write_json(job.observer.folder / NOTE, note)
    write_event(job.observer.folder, "shrunk", **note)
    return note


def _in_backward(error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_name == "backward" for frame, _ in frames)


def _describe_oom(job: Job, step: int, when: str, phase: str, error: BaseException) -> str:
    parts = [f"rank {job.mesh.rank} ran out of memory in the {phase} of {when}:"]
    parts.append(f"{wanted(error)}{budget(job.mesh.device)}.")
    if job.current_ids:
        lengths, source = job.loader.plan.lengths, job.loader.source_at(step)
        longest = max(job.current_ids, key=lambda i: float(lengths[i]))
        parts.append(
            f"The micro-batch held {len(job.current_ids)} sample(s), the longest of them "
            f"{source.name(longest)}, {lengths[longest] / lengths.mean():.1f} × as long as the mean."
        )
    if found := largest(job.engine.parts, job.mesh.device):
        parts.append(f"The largest tensors: {'; '.join(found)}.")
    return " ".join(parts)


def _remedy(job: Job, phase: str) -> str:
    """What to change, the smallest change first."""
    shard = "or shard the model with --strategy fsdp"
    size = _samples(job)
    match phase:
        case "optimizer step":
            zero = job.recipe.training.optimizer in ZERO_OPTIMIZERS
            first = "the optimizer's state with --strategy zero1, " + shard if zero else ""
            return f"Shard {first or 'the model with --strategy fsdp'}."
        case "evaluation":
            less = max(1, job.evaluation_batch // 2)
            return f"Set evaluation.batch_size={less}, {shard}."
        case "save":
            return f"Set checkpoint.asynchronous=false, which needs no second copy, {shard}."
    again = f"set training.activation_checkpointing=full, {shard}"
    if job.recipe.training.activation_checkpointing == "full":
        again = shard.removeprefix("or ")
    if _halved(job) is None:
        return (
            f"A micro-batch of {size} cannot be halved any further: leave that row out (data.max_seconds, "
            f"data.sequence_length), {again}."
        )
    return (
        "Set training.on_oom=shrink, which halves the micro-batch by itself, or "
        f"training.per_device_batch_size={math.ceil(size / 2)}, {again}."
    )
