"""How much of communication overlaps with computation, for DDP's buckets and FSDP's prefetching.

Three times, on the same micro-batches and all ranks at once: a forward and backward pass without any
messages, the messages of such a pass without computing, and both as the strategy overlaps them. What
the last takes longer than the first is exposed; the rest of the messages' own time is hidden.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from muster import run_directory
from muster.bench import results
from muster.bench.files import Document
from muster.data.loader import Batch
from muster.errors import LaunchError
from muster.observe.progress import Report, silent
from muster.parallel.layout import Layout
from muster.parallel.mesh import Mesh
from muster.planner.dtensor_recorder import DTensorRecorder
from muster.planner.messages import Message
from muster.probes.collectives import gather_into, scatter_sum
from muster.probes.repeats import times
from muster.recipe.load import load
from muster.training.job import Job
from muster.worker.prepare import open_task, prepare

WARM_UP, LEAST, MOST = 2, 5, 200  # calls, and rounds that count
PREFETCH = {"none": (False, False), "backward": (False, True), "both": (True, True)}
PLAIN = (
    "training.compile=false",  # messages are recorded operation by operation
    "training.cuda_graphs=false",
    "training.scale_with_ranks=none",
    "training.gradient_accumulation_steps=1",
    "training.per_device_batch_size=auto",
    "checkpoint.every_steps=null",
    "checkpoint.resume=auto",
    "logging.to=[]",
)


def settings(buckets: Sequence[float]) -> Iterator[tuple[str, str, list[str]]]:
    """Strategy, what is tried, and the overrides that do it."""
    for size in buckets:
        yield "ddp", f"buckets of {size:g} MB", [f"distributed.ddp.bucket_mb={size}"]
    for name, (forward, backward) in PREFETCH.items():
        yield (
            "fsdp",
            f"prefetch {name}",
            [
                f"distributed.fsdp.forward_prefetch={str(forward).lower()}",
                f"distributed.fsdp.backward_prefetch={str(backward).lower()}",
            ],
        )


def measure(
    mesh: Mesh,
    recipe: str,
    overrides: Sequence[str],
    buckets: Sequence[float],
    seconds: float,
    tell: Report = silent,
) -> Document:
    """All ranks call this together. The recipe's global batch is what each rank computes at once."""
    if mesh.world == 1:
        raise LaunchError("one rank sends nothing; start at least two (--gpus 2)")
    each = load(recipe, overrides).training.global_batch_size
    batch = f"training.global_batch_size={each * mesh.world}"
    local = [f"training.global_batch_size={each}", "distributed.strategy=ddp"]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        alone = replace(mesh, rank=0, layout=Layout(), axes=None)
        own = _job(alone, recipe, [*overrides, *PLAIN, *local], Path(folder, "alone"))
        asked = list(settings(buckets))
        for strategy, name, changes in asked:
            tell(len(rows), len(asked))
            options = [*overrides, *PLAIN, batch, f"distributed.strategy={strategy}", *changes]
            job = _job(mesh, recipe, options, Path(folder, f"{strategy}-{name}"))
            batches = job.loader.micro_batches(0)
            rows.append(
                {
                    "strategy": strategy,
                    "setting": name,
                    **_times(mesh, own, job, batches, seconds),
                }
            )
            del job
    return {
        **results.head("overlap", mesh),
        "recipe": load(recipe, overrides).name,
        "batch_per_rank": each,
        "method": {"seconds": seconds, "warm_up_calls": WARM_UP, "statistic": "median"},
        "keys": ["strategy", "setting"],
        "figure": "step_s",
        "better": "lower",
        "rows": rows,
    }


def _job(mesh: Mesh, recipe: str, overrides: list[str], folder: Path) -> Job:
    loaded = load(recipe, overrides)
    (folder / "ranks").mkdir(parents=True, exist_ok=True)
    job = prepare(loaded, mesh, run_directory.Run(folder), open_task(loaded))
    job.observer.close()
    for part in job.engine.parts:
        part.train()
    return job


def _times(
    mesh: Mesh, alone: Job, job: Job, batches: Sequence[Batch], seconds: float
) -> dict[str, Any]:
    sent = messages(job, batches)
    acts = [_pass(alone, batches), _pass(job, batches), replay(mesh, sent)]
    compute, together, apart = interleave(mesh, acts, seconds)
    longer = [both - one for one, both in zip(compute, together, strict=True)]
    difference, communication = statistics.median(longer), statistics.median(apart)
    return {
        "messages": len(sent),
        "bytes": sum(message.bytes for message in sent),
        "step_s": statistics.median(together),
        "compute_s": statistics.median(compute),
        "communication_s": communication,
        "exposed_s": max(0.0, difference),
        "uncertain_s": uncertainty(longer),
        "hidden": hidden(difference, communication, uncertainty(longer)),
        "repeats": len(longer),
    }


def interleave(
    mesh: Mesh, acts: Sequence[Callable[[], object]], seconds: float
) -> list[list[float]]:
    """Times of each act, `seconds` for each in all. One after the other in every round, and all ranks
    together, so that a drift of the machine's speed affects all of them alike."""
    once = max(times(mesh.device, act, WARM_UP)[-1] for act in acts)
    fitting = max(LEAST, min(MOST, int(seconds / once)))
    rounds = mesh.gather(fitting)[0]
    mine: list[list[float]] = [[] for _ in acts]
    for _ in range(rounds):
        for taken, act in zip(mine, acts, strict=True):
            mesh.barrier()
            taken += times(mesh.device, act, 1)
    return [
        [max(each) for each in zip(*ranks, strict=True)]
        for ranks in zip(*mesh.gather(mine), strict=True)
    ]


def uncertainty(values: Sequence[float]) -> float:
    """How far their median may be off: 95 % of samples of a normal distribution lie closer."""
    low, _, high = statistics.quantiles(values, n=4)
    return float(1.82 * (high - low) / len(values) ** 0.5)


def hidden(difference: float, communication: float, uncertain: float) -> float | None:
    """Share of the messages' own time; None where computing varies by more than half of what they
    take, or was clearly slower without them. Messages may also slow computing down: then more is
    exposed than they take alone, and nothing was hidden."""
    if uncertain > communication / 2 or difference < -uncertain:
        return None
    return min(1.0, max(0.0, 1 - difference / communication))


def _pass(job: Job, batches: Sequence[Batch]) -> Callable[[], object]:
    def act() -> None:
        job.engine.accumulate(batches, job.functions)
        job.engine.zero_grad()

    return act


def messages(job: Job, batches: Sequence[Batch]) -> list[Message]:
    """What one pass sends. The first passes settle the order of buckets and of gathering."""
    for _ in range(2):
        _pass(job, batches)()
    with DTensorRecorder() as recorder:
        _pass(job, batches)()
    return [message for message, _ in recorder.trace.messages]


def replay(mesh: Mesh, sent: Sequence[Message]) -> Callable[[], object]:
    """The same messages without computation: all started at once, then waited for."""
    calls = [_call(mesh, message) for message in sent]

    def act() -> None:
        for work in [call() for call in calls]:
            work.wait()

    return act


def _call(mesh: Mesh, message: Message) -> Callable[[], Any]:
    dtype = getattr(torch, message.dtype)
    count = message.bytes // dtype.itemsize
    mine = torch.zeros(count, dtype=dtype, device=mesh.device)
    if message.kind == "all_reduce":
        return lambda: dist.all_reduce(mine, async_op=True)
    if message.kind == "all_gather":
        whole = torch.zeros(count * mesh.world, dtype=dtype, device=mesh.device)
        return lambda: gather_into(whole, mine, async_op=True)
    if message.kind == "reduce_scatter":
        part = torch.zeros(count // mesh.world, dtype=dtype, device=mesh.device)
        return lambda: scatter_sum(part, mine, async_op=True)
    if message.kind == "broadcast":
        return lambda: dist.broadcast(mine, 0, async_op=True)
    raise LaunchError(
        f"the model sends a {message.kind} of its own, which cannot be timed alone; measure a recipe "
        "without it"
    )
