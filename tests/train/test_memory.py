"""Out of memory, for real: the loss asks for more than the process may have."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from muster.observe.memory import largest, out_of_memory
from muster.observe.results import read_lines
from muster.recipe.batch import BatchSizes
from muster.training import memory
from muster.training.job import Job
from muster.training.loop import train
from pool import RankError
from training import make_job

# Bytes that a planted loss takes for each sample: more than an allocator holds in reserve. The pages
# are never touched.
EACH = 2**30
SMALL = [
    "data.train=embedded:spoken-numbers",
    "training.steps=3",
    "training.global_batch_size=8",
    "data.max_parquet_files=1",
    "data.max_seconds=1.4",
]
SHRINK = "training.on_oom=shrink"


@contextmanager
def room_for(samples: int, device: torch.device) -> Iterator[None]:
    """As much more memory as the planted loss of so many samples takes, and a half."""
    more = int((samples + 0.5) * EACH)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(
            (torch.cuda.memory_reserved(device) + more) / total, device
        )
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class Hungry(torch.autograd.Function):
    """Takes `EACH` bytes per row for a moment, on the way there or back."""

    @staticmethod
    def forward(ctx, value, rows, where):
        ctx.rows, ctx.where = rows, where
        if where == "forward":
            torch.empty(rows * EACH, dtype=torch.uint8, device=value.device)
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.where == "backward":
            torch.empty(ctx.rows * EACH, dtype=torch.uint8, device=gradient.device)
        return gradient, None, None


def make_hungry(job: Job, where: str = "forward", steps: list[int] | None = None) -> None:
    """In all steps, or only in those (from 0)."""
    right, plan = job.task.loss, job.loader.plan
    hungry = {int(i) for step in steps or [] for i in plan.batch(step)}

    def loss(output, batch):
        value = right(output, batch)
        takes = steps is None or set(batch.ids) <= hungry
        return Hungry.apply(value, len(batch.ids), where) if takes else value

    job.task.loss = loss


def train_in(mesh, folder: str, overrides: list[str], room: int | None, *plant: Any) -> dict:
    job = make_job(mesh, folder, [*SMALL, *overrides])
    if room is not None:
        make_hungry(job, *plant)
        with room_for(room, mesh.device):
            train(job)
    else:
        train(job)
    job.observer.close()
    mesh.barrier()
    lines = read_lines(Path(folder) / "metrics.jsonl")
    return {
        "losses": [line["loss"] for line in lines],
        "norms": [line["grad_norm"] for line in lines],
        "weights": [
            local(p).detach().clone() for part in job.engine.parts for p in part.parameters()
        ],
        "accumulation": job.loader.accumulation,
    }


def local(parameter: torch.Tensor) -> torch.Tensor:
    return getattr(parameter, "_local_tensor", parameter)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


cpu_only = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU's allocator cuts up its cache: where it ends varies"
)


@cpu_only
@pytest.mark.parametrize(
    ("where", "steps"), [pytest.param("forward", None, marks=pytest.mark.full), ("backward", [0])]
)
def test_a_process_alone_halves_until_it_fits_and_trains_as_if_begun_that_small(
    ranks, tmp_path, where, steps
):
    """In all steps, which shows when the costliest is tried ahead; or in the first, another one."""
    dropout = "model.dropout=0.1"
    (got,) = ranks(1)(train_in, str(tmp_path / "a"), [SHRINK, dropout], 3, where, steps)
    small = ["training.per_device_batch_size=2", dropout]
    (fresh,) = ranks(1)(train_in, str(tmp_path / "b"), small, None)
    assert got["accumulation"] == 4
    assert got["losses"] == fresh["losses"]
    assert same(got["weights"], fresh["weights"])
    events = [e for e in read_lines(tmp_path / "a/events.jsonl") if e["event"] == "shrunk"]
    assert [(e["was"], e["per_device"]) for e in events] == [(8, 4), (4, 2)]
    when = "step 1 on rank" if steps else "(tried ahead) on rank"
    assert f"{when} 0: 4 → 2 samples at a time" in events[1]["words"]
    assert all(e["phase"] == f"{where} pass" for e in events)


def test_a_step_that_does_not_fit_is_done_again_and_the_small_size_stays(ranks, tmp_path):
    (whole,) = ranks(1)(train_in, str(tmp_path / "a"), [], None)
    (got,) = ranks(1)(train_in, str(tmp_path / "b"), [SHRINK], 5, "backward", [2])
    assert got["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert got["norms"] == pytest.approx(whole["norms"], rel=1e-4)
    assert got["losses"][:2] == whole["losses"][:2]
    assert got["accumulation"] == 2
    (event,) = [e for e in read_lines(tmp_path / "b/events.jsonl") if e["event"] == "shrunk"]
    assert event["words"] == "out of memory at step 3 on rank 0: 8 → 4 samples at a time"
    assert len(event["rows"]) == 8


@pytest.mark.guides
def test_a_shrunk_run_that_is_continued_begins_with_the_small_size(ranks, tmp_path):
    ranks(1)(train_in, str(tmp_path), [SHRINK], 5)
    (again,) = ranks(1)(train_in, str(tmp_path), [SHRINK, "training.steps=4"], None)
    assert again["accumulation"] == 2
    assert len(again["losses"]) == 4


def failure(ranks, folder: Path, *arguments: Any) -> str:
    with pytest.raises(RankError) as raised:
        ranks(1)(train_in, str(folder), *arguments)
    assert raised.value.kind == "MemoryLimitError", raised.value
    return raised.value.message


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_without_shrinking_the_error_names_rank_phase_row_and_cure(ranks, tmp_path, where):
    words = failure(ranks, tmp_path, [], 3, where, [2])
    assert f"rank 0 ran out of memory in the {where} pass of step 3: 8.00 GiB more was" in words
    (longest,) = ranks(1)(longest_of, str(tmp_path / "other"), 2)
    assert f"held 8 sample(s), the longest of them {longest} as long as the mean" in words
    assert "The largest tensors: " in words
    assert "training.on_oom=shrink" in words
    assert "training.per_device_batch_size=4" in words
    assert "activation_checkpointing=full" in words
    assert "--strategy fsdp" in words


def longest_of(mesh, folder: str, step: int) -> str:
    job = make_job(mesh, folder, SMALL)
    lengths, ids = job.loader.plan.lengths, job.loader.plan.batch(step)
    row = int(ids[np.argmax(lengths[ids])])
    return f"{job.loader.source.name(row)}, {lengths[row] / lengths.mean():.1f} ×"


@cpu_only
def test_one_sample_that_does_not_fit_ends_the_run_and_is_named(ranks, tmp_path):
    words = failure(ranks, tmp_path, [SHRINK], 0)
    assert "held 1 sample(s)" in words
    assert ".parquet row" in words
    assert "micro-batch of 1 cannot be halved any further" in words
    assert "on_oom" not in words
    last = json.loads((tmp_path / memory.NOTE).read_text())
    assert last["per_device"] == 1


def fail_elsewhere(mesh, folder: str, phase: str) -> str:
    every = 1 if phase == "evaluation" else "null"
    overrides = [f"evaluation.every_steps={every}", "evaluation.batch_size=6"]
    job = make_job(mesh, folder, [*SMALL, *overrides, SHRINK])

    def hungry(*_: Any) -> None:
        torch.empty(2**50, dtype=torch.uint8)

    if phase == "evaluation":
        job.task.score = hungry
    elif phase == "save":
        job.engine.state = hungry
    else:
        job.engine.step = hungry
    try:
        train(job)
    except memory.MemoryLimitError as error:
        return str(error)
    raise AssertionError("the run did not end")


@pytest.mark.parametrize(
    ("phase", "step", "cure"),
    [
        ("optimizer step", 1, "--strategy zero1"),
        ("evaluation", 1, "evaluation.batch_size=3"),
        ("save", 3, "checkpoint.asynchronous=false"),
    ],
)
def test_other_phases_are_told_apart_and_never_shrink(ranks, tmp_path, phase, step, cure):
    (words,) = ranks(1)(fail_elsewhere, str(tmp_path), phase)
    assert f"out of memory in the {phase} of step {step}:" in words
    assert cure in words
    assert "micro-batch held" not in words
    assert not (tmp_path / memory.NOTE).exists()


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (1, ["model.norm=batch", "model.dropout=0.1"]),
        pytest.param(
            2,
            ["model.norm=batch", "model.dropout=0.1", "training.per_device_batch_size=2"],
            marks=pytest.mark.full,
        ),
        pytest.param(2, ["distributed.strategy=fsdp"], marks=pytest.mark.full),
        pytest.param(
            2,
            ["distributed.strategy=zero2", "training.per_device_batch_size=2"],
            marks=pytest.mark.full,
        ),
    ],
)
def test_trying_the_costliest_batch_leaves_no_trace(ranks, tmp_path, world, overrides):
    plain = ranks(world)(train_in, str(tmp_path / "a"), overrides, None)
    tried = ranks(world)(train_in, str(tmp_path / "b"), [SHRINK, *overrides], None)
    assert plain[0]["losses"] == tried[0]["losses"]
    assert plain[0]["norms"] == tried[0]["norms"]
    for one, other in zip(plain, tried, strict=True):
        assert same(one["weights"], other["weights"])


def tried_first(mesh, folder: str) -> tuple[list[int], float]:
    """The samples of the first micro-batch that is computed, and the longest planned length."""
    job = make_job(mesh, folder, [*SMALL, SHRINK, "training.per_device_batch_size=2"])
    right, first = job.task.loss, []
    job.task.loss = lambda output, batch: (first.append(batch.ids), right(output, batch))[1]
    train(job)
    job.observer.close()
    lengths = job.loader.plan.lengths
    longest = max(lengths[job.loader.plan.batch(step)].max() for step in range(job.steps))
    return float(lengths[first[0]].max()), float(longest)


@pytest.mark.guides
def test_what_is_tried_first_holds_the_longest_sample_of_the_run(ranks, tmp_path):
    tried, longest = zip(*ranks(2)(tried_first, str(tmp_path)), strict=True)
    assert max(tried) == longest[0]


def note_of(mesh, folder: str, notes: dict[int, dict], sizes: BatchSizes, flow: int) -> BatchSizes:
    """Each rank looks into a folder of its own, as on machines that share no disk."""
    mine = Path(folder) / str(mesh.rank)
    mine.mkdir(parents=True, exist_ok=True)
    if mesh.rank in notes:
        (mine / memory.NOTE).write_text(json.dumps(notes[mesh.rank]))
    return memory.shrunk_sizes(sizes, mesh, mine, flow)


def note(per_device: int, accumulation: int, data_ranks: int = 2) -> dict[str, Any]:
    sizes = {"per_device": per_device, "accumulation": accumulation, "data_ranks": data_ranks}
    return {**sizes, "words": "out of memory"}


@pytest.mark.parametrize(
    ("notes", "sizes", "flow", "expected"),
    [
        ({}, (32, 16, 1), 1, (16, 1)),
        ({1: note(8, 2)}, (32, 16, 1), 1, (8, 2)),
        ({0: note(8, 2), 1: note(4, 4)}, (32, 16, 1), 1, (4, 4)),
        ({1: note(8, 2)}, (32, 4, 4), 1, (4, 4)),  # the recipe asks for less already
        ({1: note(8, 1, data_ranks=4)}, (32, 16, 1), 1, (8, 2)),  # was written by four ranks
        ({1: note(2, 2)}, (7, 4, 1), 1, (2, 2)),  # 2 × 2 hold 7 with two at a time
        ({1: note(2, 8)}, (32, 16, 1), 4, (8, 2)),  # in a pipeline it counts pieces
    ],
)
def test_all_ranks_take_the_smallest_size_any_of_them_knows_of(
    ranks, tmp_path, notes, sizes, flow, expected
):
    total, per_device, accumulation = sizes
    found = ranks(2)(
        note_of, str(tmp_path), notes, BatchSizes(total, per_device, accumulation, 2), flow
    )
    assert found == [BatchSizes(total, *expected, 2)] * 2


def test_a_batch_that_a_pipeline_cannot_cut_further_ends_the_run(ranks, tmp_path):
    """Or it would start again for ever."""
    with pytest.raises(RankError) as raised:
        ranks(2)(note_of, str(tmp_path), {0: note(1, 3)}, BatchSizes(6, 3, 1, 2), 2)
    assert raised.value.kind == "MemoryLimitError"
    assert "training.global_batch_size" in raised.value.message


def asks_too_much() -> list[Callable[[], object]]:
    return [lambda: torch.empty(2**50), lambda: np.empty(2**50), lambda: bytearray(2**60)]


@pytest.mark.parametrize("ask", asks_too_much(), ids=["torch", "numpy", "python"])
def test_every_allocator_is_understood(ask):
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        ask()
    assert out_of_memory(raised.value)
    explained = RuntimeError("graphs need more")
    explained.__cause__ = raised.value
    assert out_of_memory(explained)


def test_other_errors_are_not_taken_for_it():
    with pytest.raises(RuntimeError) as raised:
        torch.zeros(2) + torch.zeros(3)
    assert not out_of_memory(raised.value)


@pytest.mark.guides
def test_the_largest_tensors_are_named():
    model = torch.nn.Linear(1000, 3000)
    model.weight.grad = torch.zeros_like(model.weight)
    batch = torch.zeros(5_000_000)
    view = batch[:10]
    found = largest([model], torch.device("cpu"), count=500)
    assert "19.1 MiB [5000000] float32" in found or "19.1 MiB [10] float32" in found
    assert "11.4 MiB weight [3000, 1000] float32" in found
    assert "11.4 MiB gradient of weight [3000, 1000] float32" in found
    assert len(view) == 10
