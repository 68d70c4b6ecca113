"""What the loop does when numbers go wrong, and what the clock counts."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.observe.results import read_lines
from muster.training import loop
from muster.training.loop import train
from muster.training.optimizer import learning_rate, make_optimizer
from pool import RankError
from training import make_job, weights

LIMIT = 3


@contextmanager
def reading(late: bool) -> Iterator[None]:
    """A step's results are read after the next step, as on a GPU, or at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_reads_late", lambda job: late)
        yield


def poisoned(
    mesh, folder: str, rank: int, steps: list[int], overrides: list[str], late: bool = False
) -> dict[str, Any]:
    """Train six steps; on `rank` the loss is not a number in `steps` (counted from 1)."""
    job = make_job(
        mesh, folder, ["training.steps=6", f"training.max_bad_steps={LIMIT}", *overrides]
    )
    right, calls = job.task.loss, iter(range(1, 100))

    def loss(model, batch):
        value = right(model, batch)
        return value * float("nan") if mesh.rank == rank and next(calls) in steps else value

    job.task.loss = loss
    before = weights(job).clone()
    with reading(late):
        train(job)
    job.observer.close()
    return {"before": before, "after": weights(job)}


@pytest.mark.parametrize("late", [False, True])
def test_a_nan_on_one_rank_is_skipped_by_all_and_counted(ranks, tmp_path, late):
    results = ranks(2)(poisoned, str(tmp_path), 1, [2, 3, 5], [], late)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if line.get("skipped")] == [2, 3, 5]
    assert all(math.isfinite(line["loss"]) for line in lines if not line.get("skipped"))
    assert torch.equal(results[0]["after"], results[1]["after"])
    assert results[0]["after"].isfinite().all()


def test_a_skipped_step_leaves_the_weights_alone(ranks, tmp_path):
    results = ranks(1)(poisoned, str(tmp_path), 0, [1, 2], ["training.steps=2"])
    assert torch.equal(results[0]["before"], results[0]["after"])


def poisoned_activation(mesh, folder: str, late: bool) -> list[torch.Tensor]:
    """Train four steps with batch normalisation; a clip of the second holds a value that is not a number."""
    job = make_job(mesh, folder, ["model.norm=batch", "training.steps=4"])
    right, calls = job.task.prepare, iter(range(1, 100))

    def prepare(batch):
        prepared = right(batch)
        if next(calls) == 2 and mesh.rank == 0:
            prepared["features"][0, 0] = math.nan
        return prepared

    job.task.prepare = prepare
    with reading(late):
        train(job)
    job.observer.close()
    return [b for part in job.engine.parts for b in part.buffers() if b.is_floating_point()]


@pytest.mark.parametrize(("world", "late"), [(1, True), (2, False)])
def test_a_skipped_step_leaves_no_trace_in_running_statistics(ranks, tmp_path, world, late):
    buffers = ranks(world)(poisoned_activation, str(tmp_path), late)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if line.get("skipped")] == [2]
    assert len(buffers[0]) > 0
    assert all(b.isfinite().all() for found in buffers for b in found)


@pytest.mark.parametrize("late", [False, True])
def test_too_many_bad_steps_in_a_row_end_the_run_with_the_rows_named(ranks, tmp_path, late):
    with pytest.raises(RankError) as failure:
        ranks(2)(poisoned, str(tmp_path), 1, [2, 3, 4], [], late)
    assert failure.value.kind == "DataError"
    assert "step 4" in failure.value.message
    assert ".parquet row" in failure.value.message
    assert "training.max_bad_steps" in failure.value.message


def named_rows(mesh, folder: str) -> tuple[str, list[str]]:
    job = make_job(mesh, folder, ["training.steps=1", "training.max_bad_steps=1"])
    right = job.task.loss
    job.task.loss = lambda model, batch: right(model, batch) * (math.nan if mesh.rank == 1 else 1)
    mine = [job.loader.source.name(i) for b in job.loader.micro_batches(0) for i in b.ids]
    try:
        train(job)
    except Exception as error:
        return str(error), mine
    raise AssertionError("the run did not end")


def test_only_rows_of_the_bad_micro_batch_are_blamed(ranks, tmp_path):
    (message, good), (_, bad) = ranks(2)(named_rows, str(tmp_path))
    assert all(name in message for name in bad[:16])
    assert not any(f"{name}," in message for name in good)


def test_stop_is_agreed_on_when_only_rank_0_sees_the_request(ranks, tmp_path):
    (tmp_path / "stop-requested").touch()
    done = ranks(2)(train_until_stopped, str(tmp_path))
    assert done == [1, 1]


def train_until_stopped(mesh, folder: str) -> int:
    job = make_job(mesh, folder, ["training.steps=6"])
    done = train(job)
    job.observer.close()
    return done


def course(mesh, folder: str, late: bool) -> tuple[list[Any], list[str], torch.Tensor]:
    """Lines and events without their times, and the weights, of a run that scores and saves midway."""
    words = ["training.steps=6", "evaluation.every_steps=4", "checkpoint.every_steps=3"]
    job = make_job(mesh, folder, words)
    with reading(late):
        train(job)
    job.observer.close()
    lines = read_lines(Path(folder) / "metrics.jsonl")
    kept = [{k: line[k] for k in ("step", "loss", "grad_norm", "lr", "samples")} for line in lines]
    events = [f"{e['event']} {e.get('step')}" for e in read_lines(Path(folder) / "events.jsonl")]
    return kept, events, weights(job)


def test_results_that_are_read_late_are_the_same(ranks, tmp_path):
    (at_once,) = ranks(1)(course, str(tmp_path / "at once"), False)
    (late,) = ranks(1)(course, str(tmp_path / "late"), True)
    assert [line["step"] for line in late[0]] == [1, 2, 3, 4, 5, 6]
    assert late[:2] == at_once[:2]
    assert torch.equal(late[2], at_once[2])


def clipped(mesh, folder: str) -> tuple[torch.Tensor, torch.Tensor, list[float], list[float]]:
    """Weights and gradient norms after four clipped steps, and those of a plain loop with torch's own
    clipping and AdamW."""
    words = ["training.steps=4", "training.max_grad_norm=0.5", "training.lr=1e-2"]
    job = make_job(mesh, folder, [*words, "training.global_batch_size=4"], "gpt-micro")
    model, norms = copy.deepcopy(job.engine.parts[0]), []
    optimizer = make_optimizer(job.recipe.training, model.named_parameters())
    for step in range(job.steps):
        for group in optimizer.param_groups:
            group.update(lr=learning_rate(job.recipe.training, step, job.steps), fused=False)
        (batch,) = job.loader.micro_batches(step)
        (job.task.loss(model(*job.task.inputs(batch).args), batch) / batch.units).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    train(job)
    job.observer.close()
    found = [line["grad_norm"] for line in read_lines(Path(folder) / "metrics.jsonl")]
    plain = torch.cat([p.detach().flatten() for p in model.parameters()])
    return weights(job), plain, found, norms


def test_clipped_steps_are_those_of_a_plain_loop(ranks, tmp_path):
    ((ours, plain, found, norms),) = ranks(1)(clipped, str(tmp_path))
    assert min(norms) > 0.5, "nothing was clipped"
    assert found == pytest.approx(norms, rel=1e-5)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def losses_in(mesh, folder: str, precision: str) -> list[float]:
    """Of small batches: processors without bf16 compute it a hundred times slower."""
    small = ["training.steps=3", "training.global_batch_size=2"]
    job = make_job(mesh, folder, [*small, f"training.precision={precision}"])
    train(job)
    job.observer.close()
    return [line["loss"] for line in read_lines(Path(folder) / "metrics.jsonl")]


def test_bf16_trains_close_to_fp32(ranks, tmp_path):
    exact = ranks(1)(losses_in, str(tmp_path / "fp32"), "fp32")[0]
    rough = ranks(1)(losses_in, str(tmp_path / "bf16"), "bf16")[0]
    assert rough != exact
    assert rough == pytest.approx(exact, rel=0.02)  # bf16 keeps eight bits
