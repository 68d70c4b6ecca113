"""Loss spikes: found before the update, and answered the same on every rank and any world."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.errors import DataError, StartAgain
from muster.observe.console import event_words
from muster.observe.events import restarts
from muster.observe.results import complete_steps, read_lines
from muster.parallel.mesh import Mesh
from muster.training import loop, rewind
from muster.training.job import Job
from muster.training.loop import train
from muster.training.rewind import Rewind, next_rewind, read_rewinds
from muster.training.spikes import LEAST, WINDOW, History, Limits
from pool import RankError
from training import make_job

AT = 36  # the step that spikes, counted from 1
STEPS = 40
HUGE = 1e3  # times what the loss would be


def history(values: list[float]) -> History:
    found = History(6.0)
    for step, value in enumerate(values):
        found.add(step, value, 2 * value, found.limits(step))
    return found


def level(i: int) -> float:
    return 1.0 + 0.1 * (-1) ** i


def test_there_is_no_limit_before_enough_steps_were_read():
    """Steps 0 to LEAST - 1 count for step LEAST + 1, since a step is judged before the one before it is read."""
    found = history([level(i) for i in range(LEAST + 1)])
    assert found.limits(LEAST) == Limits(math.inf, math.inf)
    limits = found.limits(LEAST + 1)
    assert limits.loss == pytest.approx(1.0 + 6 * 0.1)
    assert limits.grad_norm == pytest.approx(2.0 + 6 * 0.2)


def test_limits_are_of_the_last_steps_but_one_alone():
    values = [50.0] * 10 + [level(i) for i in range(WINDOW)]
    found = history(values)
    assert found.limits(len(values) + 1).loss == pytest.approx(1.6)
    assert found.limits(len(values)).loss > 10  # one of the first ten still counts
    before = found.limits(len(values))
    found.add(len(values), 1.5, 3.0, before)  # read at once on a CPU, late on a GPU
    assert found.limits(len(values) + 1).loss == pytest.approx(1.6)


def test_one_spike_does_not_hide_the_next_and_a_new_level_is_taken():
    found = history([level(i) for i in range(WINDOW)])
    above = []
    for step in range(WINDOW, WINDOW + 60):
        limits = found.limits(step)
        above.append(limits.loss < 10)
        found.add(step, 10.0, 10.0, limits)
    assert all(above[:10])
    assert not any(above[40:])


def test_what_is_not_finite_does_not_count_and_rounding_is_no_spike():
    found = history([1.0] * WINDOW)
    found.add(WINDOW, math.nan, 1.0, Limits())
    found.add(WINDOW + 1, 1.0, math.inf, Limits())
    limits = found.limits(WINDOW + 3)
    assert 1.0 + 1e-6 < limits.loss < 1.01


def test_the_history_in_a_checkpoint_is_exact_and_a_damaged_one_begins_anew():
    found, again = history([level(i) / 3 for i in range(WINDOW + 9)]), History(6.0)
    again.load(found.state())
    assert again.limits(WINDOW + 9) == found.limits(WINDOW + 9)
    for damaged in ("", "[1]", "[[1, 2]]", '{"a": 1}', '[["x", null, 1]]', "[" * 100_000):
        again.load(damaged)
        assert again.limits(WINDOW + 9) == Limits()


def test_a_rewind_leaves_out_twice_as_many_where_the_last_one_did_not_help():
    kept, found = [60, 80, 100], list[Rewind]()
    for step in (105, 110, 115, 130):
        found.append(next_rewind(found, step, kept))
    assert [(one.first, one.step, one.to) for one in found] == [
        (105, 105, 100),
        (109, 110, 100),
        (112, 115, 100),
        (123, 130, 100),
    ]
    far = next_rewind(found, 130 + rewind.NEAR + 1, [60, 100, 150])
    assert (far.count, far.first, far.to) == (1, 163, 150)


def test_a_rewind_goes_back_before_what_it_leaves_out_or_as_far_as_it_can():
    before = [Rewind(100, 16, 85, 80)]
    assert next_rewind(before, 102, [60, 70, 80]).to == 70  # 32 steps: 71 to 102
    assert next_rewind(before, 102, [80, 90]) == Rewind(102, 32, 81, 80)
    assert next_rewind(before, 102, []) == Rewind(102, 32, 71, 0)
    assert next_rewind([], 1, []) == Rewind(1, 1, 1, 0)
    with pytest.raises(DataError, match="128 steps before it were left out"):
        next_rewind([Rewind(200, 128, 73, 70)], 201, [70])


@contextmanager
def spiking(job: Job, steps: dict[int, float], *, late: bool) -> Iterator[None]:
    """The loss of these steps, counted from 1, is so many times as large."""
    right, real, now = job.task.loss, loop.seed_step, [0]

    def seed(seed: int, step: int, rank: int) -> None:
        now[0] = step + 1
        real(seed, step, rank)

    job.task.loss = lambda model, batch: right(model, batch) * steps.get(now[0], 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "seed_step", seed)
        patch.setattr(loop, "_reads_late", lambda job: late)
        yield


def run(
    mesh: Mesh,
    folder: str,
    recipe: str,
    overrides: list[str],
    spikes: dict[int, float],
    late: bool = False,
    without: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Train, and start again as often as the run asks for it. Steps in `without` make no update whatever their loss."""
    asked = [f"training.steps={STEPS}", "training.lr=1e-3", "checkpoint.every_steps=10", *overrides]
    for _ in range(9):
        job = make_job(mesh, folder, asked, recipe)
        real, at = job.engine.step, [job.start]

        def step(*given: Any, real: Any = real, at: list[int] = at) -> None:
            at[0] += 1
            if at[0] not in without:
                real(*given)

        job.engine.step = step  # type: ignore[method-assign]
        try:
            with spiking(job, spikes, late=late):
                train(job)
        except StartAgain as error:
            said = str(error)
            continue
        finally:
            job.observer.close()
        return {"weights": held(job), "start": job.start, "said": said if _ else ""}
    raise AssertionError("it began again and again")


def held(job: Job) -> torch.Tensor:
    """This rank's weights, or its shards of them."""
    parameters = [p.detach() for part in job.engine.parts for p in part.parameters()]
    return torch.cat([getattr(p, "to_local", lambda p=p: p)().flatten() for p in parameters])


def events(folder: Path, what: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(folder / "events.jsonl") if event["event"] == what]


@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.guides), True])
def test_a_skipped_spike_is_a_step_without_update(ranks, recipe, tmp_path, late):
    spikes = {AT: HUGE}
    skip = ["training.on_spike=skip"]
    (plain,) = ranks(1)(run, str(tmp_path / "a"), recipe, [], spikes, late, (AT,))
    (skipped,) = ranks(1)(run, str(tmp_path / "b"), recipe, skip, spikes, late)
    assert torch.equal(plain["weights"], skipped["weights"])
    (event,) = events(tmp_path / "b", "spike")
    assert (event["step"], event["skipped"], event["answer"]) == (AT, True, "skip")
    assert event["loss"] > 50 * event["loss_limit"]
    assert event_words(event).endswith("; the update is skipped")
    lines = read_lines(tmp_path / "b" / "metrics.jsonl")
    assert [line["step"] for line in lines if line.get("skipped")] == [AT]
    (event,) = events(tmp_path / "a", "spike")
    assert not event["skipped"]  # `continue` only tells


def test_ranks_skip_together_and_nan_counts_as_a_spike(ranks, recipe, tmp_path):
    skip = ["training.on_spike=skip"]
    one, other = ranks(2)(run, str(tmp_path), recipe, skip, {AT: HUGE, 3: math.nan})
    assert torch.equal(one["weights"], other["weights"])
    found = events(tmp_path, "spike")
    assert [(event["step"], event["skipped"]) for event in found] == [(3, True), (AT, True)]
    assert "loss" not in found[0]  # JSON has no NaN


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "zero3", "pipeline"])
def test_every_strategy_skips_a_spike(ranks, recipe, tmp_path, strategy):
    asked, spikes = [f"distributed.strategy={strategy}"], {AT: HUGE}
    skip = ["training.on_spike=skip", *asked]
    plain = ranks(2)(run, str(tmp_path / "a"), recipe, asked, spikes, False, (AT,))
    skipped = ranks(2)(run, str(tmp_path / "b"), recipe, skip, spikes)
    for one, other in zip(plain, skipped, strict=True):
        assert torch.equal(one["weights"], other["weights"])
    lines = [read_lines(tmp_path / name / "metrics.jsonl") for name in ("a", "b")]
    assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]]
    assert [event["step"] for event in events(tmp_path / "b", "spike")] == [AT]


def test_stop_names_step_loss_limit_and_rows(ranks, recipe, tmp_path):
    with pytest.raises(RankError) as failure:
        ranks(2)(run, str(tmp_path), recipe, ["training.on_spike=stop"], {AT: HUGE}, True)
    words = failure.value.message
    assert failure.value.kind == "DataError"
    assert f"the loss and the gradient norm spike at step {AT}: loss " in words
    assert "(limit " in words
    assert "train.txt" in words
    assert "the newest complete one is step 30" in words
    assert "training.on_spike=skip or rewind" in words
    assert complete_steps(tmp_path) == [10, 20, 30]


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.guides), 2])
def test_a_rewind_leaves_out_the_batch_and_a_resumed_run_does_too(ranks, recipe, tmp_path, world):
    again, spikes = ["training.on_spike=rewind"], {AT: HUGE, AT + 8: HUGE}
    longer = [f"training.steps={STEPS + 6}", *again]
    plain = ranks(world)(run, str(tmp_path / "a"), recipe, longer, {}, False, (AT, AT + 7, AT + 8))
    ranks(world)(run, str(tmp_path / "b"), recipe, again, spikes, True)
    assert read_rewinds(tmp_path / "b") == [Rewind(AT, 1, AT, 30)]
    found = ranks(world)(run, str(tmp_path / "b"), recipe, longer, spikes, True)
    assert all(torch.equal(one["weights"], plain[0]["weights"]) for one in found)
    assert found[0]["start"] == STEPS  # where the second rewind went
    assert found[0]["said"].endswith(
        "; back to the checkpoint of step 40, to go on without the batch of steps 43 to 44"
    )
    lines = read_lines(tmp_path / "b" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 7))
    assert [line["step"] for line in lines if line.get("left_out")] == [AT, AT + 7, AT + 8]
    assert [line["samples"] for line in lines] == [8] * len(lines)
    (event, _) = events(tmp_path / "b", "rewind")
    assert (event["step"], event["first"], event["to"]) == (AT, AT, 30)
    assert "went on from step 30" in restarts(tmp_path / "b")[0].words()


def test_checkpoints_behind_which_a_run_went_back_are_removed(ranks, recipe, tmp_path):
    """Also where it was killed right after it wrote what it leaves out."""
    ranks(1)(run, str(tmp_path), recipe, [], {})
    assert complete_steps(tmp_path) == [20, 30, 40]
    told = {"rewinds": [{"step": 33, "count": 8, "first": 26, "to": 20}]}
    (tmp_path / rewind.FILE).write_text(json.dumps(told))
    ranks(1)(run, str(tmp_path), recipe, [], {})
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if line.get("left_out")] == list(range(26, 34))
    manifest = json.loads((tmp_path / "checkpoints" / "step-40" / "manifest.json").read_text())
    assert manifest["trainer"]["rewinds"] == told["rewinds"]
    ranks(1)(run, str(tmp_path), recipe, [], {})  # it has seen the rewind, and stays
    assert complete_steps(tmp_path) == [20, 30, 40]
    assert len(events(tmp_path, "resumed")) == 2
    (tmp_path / rewind.FILE).unlink()  # on an empty disk, to which a mirror has only checkpoints
    ranks(1)(run, str(tmp_path), recipe, [], {})
    assert json.loads((tmp_path / rewind.FILE).read_text()) == told


def test_a_damaged_file_of_what_is_left_out_is_refused(ranks, recipe, tmp_path):
    for text in ("[]", '{"rewinds": 3}', '{"rewinds": [{"step": 3}]}', "{"):
        (tmp_path / rewind.FILE).write_text(text)
        with pytest.raises(RankError, match=r"left_out\.json"):
            ranks(1)(run, str(tmp_path), recipe, [], {})
