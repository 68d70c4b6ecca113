"""Silent corruption: a bit that flips in one rank is found before anything is saved of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from muster.observe.results import complete_steps, read_lines
from muster.parallel.mesh import Mesh
from muster.parallel.replicas import LANES, by_part, hashes
from muster.training.loop import train
from muster.training.replicas import difference
from parallel.models import GPT, course, make_batch, make_engine, micro_batches
from pool import RankError
from training import make_job

TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.int64)


def flip(tensor: Tensor, bit: int = 0) -> None:
    """One bit of its last element, in place."""
    data = tensor.detach().reshape(-1)[-1:].view(torch.uint8)
    data[0] ^= 1 << bit


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_every_bit_and_every_place_changes_the_hash(kind):
    drawn = torch.randint(0, 2, (3, 7), generator=torch.Generator().manual_seed(0)).to(kind)
    found = {hashes([drawn])[0]}
    data = drawn.view(torch.uint8).flatten()
    for i in range(data.numel()):
        for bit in range(8):
            data[i] ^= 1 << bit
            found.add(hashes([drawn])[0])
            data[i] ^= 1 << bit
    found.add(hashes([drawn.new_zeros(0)])[0])
    found.add(hashes([drawn.flip(0)])[0])
    assert len(found) == 1 + 8 * data.numel() + 2


def test_memory_that_reads_all_ones_is_not_taken_for_zeros():
    zeros = torch.zeros(64, dtype=torch.int64)
    assert hashes([zeros]) != hashes([~zeros])


def test_a_hash_depends_on_values_alone():
    """Not on where they lie in memory, nor on pieces; high bits in the first of several pieces count too."""
    whole = torch.arange(LANES * 4 + 3, dtype=torch.float32)
    moved = torch.cat([torch.zeros(1), whole])[1:]
    transposed = torch.arange(12.0).view(3, 4).T
    first, same, one, other = hashes([whole, moved, transposed, transposed.contiguous()])
    assert (first, one) == (same, other)
    seen = {first}
    for place in (0, 1, LANES * 2, LANES * 4):
        for bit in (7, 6):
            data = whole[place : place + 1].view(torch.uint8)
            data[3] ^= 1 << bit
            seen.add(hashes([whole])[0])
            data[3] ^= 1 << bit
    assert len(seen) == 9


def compared(mesh: Mesh, rows: list[tuple[dict[str, Any], int, str]]) -> list[tuple[Any, Any]]:
    """Of each strategy: what is said of its replicas after three steps, and after a bit flipped in a rank's tensor."""
    found = []
    for options, rank, name in rows:
        engine, batch = make_engine(mesh, GPT, options), make_batch(GPT, 8)
        course(engine, micro_batches(mesh, options, batch, 2), batch.units)
        before = difference(mesh, by_part(engine.held()))
        chosen = [h.tensor for h in engine.held() if h.name == name and h.tensor.numel()]
        if mesh.rank == rank:
            flip(chosen[0])
        found.append((before, difference(mesh, by_part(engine.held()))))
    return found


NORM, HEAD, MOMENT = "norm.weight", "embed.tokens.weight", "norm.bias (exp_avg_sq)"
TENSOR_COPIES = {"strategy": "hybrid", "tensor": 2, "replicate": 2}
STAGE_COPIES = {"strategy": "hybrid", "pipeline": 2, "replicate": 2}
ROWS: dict[
    int, list[tuple[dict[str, Any], int, str, list[int]]]
] = {  # … and the ranks that are named
    2: [
        ({"strategy": "ddp"}, 1, MOMENT, [0, 1]),
        ({"strategy": "zero1"}, 0, NORM, [0, 1]),
        ({"strategy": "tensor"}, 1, NORM, [0, 1]),
        ({"strategy": "pipeline"}, 1, HEAD, [0, 1]),  # tied: both stages hold it
    ],
    3: [({"strategy": "ddp"}, 1, NORM, [1])],
    4: [
        ({"strategy": "ddp"}, 2, NORM, [2]),
        ({"strategy": "hsdp", "replicate": 2}, 3, HEAD, [1, 3]),  # which have the same shard
        (TENSOR_COPIES, 0, HEAD, [0, 2]),
        (TENSOR_COPIES, 0, NORM, [0]),
        (STAGE_COPIES, 3, MOMENT, [2, 3]),
    ],
}


@pytest.mark.parametrize(
    "world",
    [
        2,
        pytest.param(3, marks=pytest.mark.full),
        pytest.param(4, marks=pytest.mark.guides),
    ],
)
def test_a_flipped_bit_is_found_and_its_rank_named(ranks, world):
    """The rank that differs from most; of two, both."""
    rows = ROWS[world]
    answers = ranks(world)(compared, [row[:3] for row in rows])
    assert all(answer == answers[0] for answer in answers)
    for (options, _, name, named), (before, after) in zip(rows, answers[0], strict=True):
        assert before is None, options
        assert after is not None, options
        assert f" {name}, " in after
        words = after.partition(" differs from " if len(named) == 1 else " hold ")[0]
        assert [int(word) for word in re.findall(r"rank (\d+) \(", words)] == named, (
            options,
            after,
        )


def train_with_a_flip(mesh: Mesh, folder: str, recipe: str, overrides: list[str], at: int) -> int:
    """A bit flips in rank 1 during step `at`. Returns how often replicas were compared."""
    job = make_job(mesh, folder, overrides, recipe)
    real, taken = job.engine.step, job.start

    def step(*arguments: Any) -> None:
        nonlocal taken
        real(*arguments)
        taken += 1
        if taken == at and mesh.rank == 1:
            flip(next(job.engine.parts[0].parameters()))

    job.engine.step = step  # type: ignore[method-assign]
    try:
        train(job)
    finally:
        job.observer.close()
    return job.comparisons


def test_a_run_with_a_flipped_bit_ends_before_it_saves(ranks, recipe, tmp_path):
    asked = ["training.steps=9", "checkpoint.every_steps=4", "checkpoint.verify_steps=3"]
    for _ in range(2):  # the second goes on from step 4, and saves nothing itself
        with pytest.raises(RankError) as failure:
            ranks(2)(train_with_a_flip, str(tmp_path), recipe, asked, 5)
        assert failure.value.kind == "ReplicaError"
        assert failure.value.message.startswith("after step 6 rank 0 (")
        assert "hold different values of embed" in failure.value.message
        assert "the newest complete one is step 4" in failure.value.message
        assert complete_steps(tmp_path) == [4]
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == list(range(1, 7))


def test_replicas_are_compared_before_saves_and_when_asked_only(ranks, recipe, tmp_path):
    asked = ["training.steps=5", "checkpoint.every_steps=2"]
    assert ranks(2)(train_with_a_flip, str(tmp_path / "a"), recipe, asked, 0) == [3, 3]  # 2, 4, 5
    off = [*asked, "checkpoint.verify_replicas=false"]
    assert ranks(2)(train_with_a_flip, str(tmp_path / "b"), recipe, off, 1) == [0, 0]
    assert complete_steps(tmp_path / "b") == [2, 4, 5]


def compared_in_training(mesh: Mesh, folder: str, recipe: str, options: list[str]) -> list[int]:
    """How often replicas were compared in three steps, and after a resume in two more; each with an evaluation."""
    found = []
    for steps in (3, 5):
        asked = [f"training.steps={steps}", "checkpoint.every_steps=3", "evaluation.every_steps=1"]
        job = make_job(mesh, folder, [*asked, "checkpoint.verify_steps=1", *options], recipe)
        train(job)
        job.observer.close()
        found.append(job.comparisons)
    return found


OPTIMIZERS = {name: [f"training.optimizer={name}"] for name in ("muon", "adafactor", "adamw-8bit")}
HSDP = ["distributed.strategy=hsdp", "distributed.replicate=2"]
QUIET = {
    2: {
        **OPTIMIZERS,
        "bf16": ["training.precision=bf16"],
        "LoRA": ["model.lora.rank=4", "model.lora.dropout=0.1"],
        "zero1": ["distributed.strategy=zero1"],
        "zero2": ["distributed.strategy=zero2"],
    },
    4: {
        "hsdp": HSDP,
        **{f"hsdp, {name}": [*HSDP, *options] for name, options in OPTIMIZERS.items()},
        "hsdp, LoRA": [*HSDP, "model.lora.rank=4"],
        "hsdp, offloaded": [*HSDP, "distributed.fsdp.cpu_offload=true"],
        "context in groups": ["distributed.strategy=context", "distributed.context=2"],
    },
}


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world, rows in QUIET.items() for name in rows]
)
def test_replicas_that_are_equal_raise_no_alarm(ranks, recipe, tmp_path, world, name):
    """In whatever way they are trained, after evaluations and after a resume."""
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    if name.endswith("8bit"):
        pytest.importorskip("torchao")
    found = ranks(world)(compared_in_training, str(tmp_path), recipe, QUIET[world][name])
    assert found == [[3, 2]] * world


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["fsdp", "context", "zero3"])
def test_what_no_two_ranks_hold_is_not_compared(ranks, recipe, tmp_path, strategy):
    if strategy == "zero3":
        pytest.importorskip("deepspeed")
    options = [f"distributed.strategy={strategy}"]
    found = ranks(2)(compared_in_training, str(tmp_path), recipe, options)
    assert found == [[0, 0]] * 2
