"""What a run writes down at every step, and what a resumed one takes back."""

import json
import math

import pytest

from muster.observe.observer import Observer, StepRecord
from muster.observe.results import STOP_FILE, read_lines

KEYS = {
    "step",
    "epoch",
    "loss",
    "grad_norm",
    "lr",
    "samples",
    "samples_per_s",
    "step_time_s",
    "data_wait_s",
    "memory_gib",
    "time",
}


class Alone:
    """A world of one."""

    def gather(self, value):
        return [value]


class Twice:
    """A world of two in which the other rank computes twice as long."""

    def gather(self, value):
        return [value, [(2 * times[0], *times[1:]) for times in value]]


def record(step: int, **changes) -> StepRecord:
    values = {
        "step": step,
        "epoch": 0,
        "loss": 1 / 3,
        "grad_norm": 0.1 + 0.2,
        "lr": 1e-3,
        "samples": 32,
        "step_time_s": 0.5,
        "data_wait_s": 0.05,
        "comm_wait_s": 0.1,
        "compute_s": 0.3,
        "filled": 90,
        "cells": 100,
        "amounts": {},
        "skipped": False,
    }
    return StepRecord(**values | changes)


def test_scoring_tells_how_far_it_is_at_intervals(tmp_path, monkeypatch):
    made, clock = observer(tmp_path), iter([0.0, 1.0, 4.9, 5.0, 6.0, 10.5])
    monkeypatch.setattr("muster.observe.observer.time.monotonic", lambda: next(clock))
    progress = made.scoring("test", 9)
    for done in range(5):
        progress(done, 8)
    told = read_lines(tmp_path / "events.jsonl")
    assert [(e["event"], e["done"], e["batches"], e["seconds"]) for e in told] == [
        ("scoring", 2, 8, 5.0),
        ("scoring", 4, 8, 10.5),
    ]
    monkeypatch.undo()
    made.scoring("test", 9, at_once=True)(0, 8)
    assert read_lines(tmp_path / "events.jsonl")[-1]["done"] == 0
    made.close()


def observer(folder, rank: int = 0, start: int = 0, every: int = 10, trackers=None):
    return Observer(folder, rank, every_steps=every, start=start, trackers=trackers)


def run(folder, steps, **options) -> Observer:
    made = observer(folder, **options)
    for step in steps:
        made.step(record(step), Alone())
    made.close()
    return made


def steps(path) -> list[int]:
    return [line["step"] for line in read_lines(path)]


def test_a_line_has_exactly_the_documented_keys_at_full_precision(tmp_path):
    run(tmp_path, [1])
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert set(line) == KEYS
    assert line["loss"] == 1 / 3
    assert line["grad_norm"] == 0.1 + 0.2
    assert line["samples_per_s"] == 64.0
    assert 0.01 < line["memory_gib"] < 1000


def test_rates_and_skipped_steps_add_their_keys():
    line = record(1, amounts={"audio_s": 60.0, "tokens": 500.0}, skipped=True).metrics()
    assert set(line) == KEYS | {"audio_s_per_s", "tokens_per_s", "skipped"}
    assert line["audio_s_per_s"] == 120.0
    assert line["tokens_per_s"] == 1000.0


def test_every_line_is_on_disk_before_the_next_step(tmp_path):
    made = observer(tmp_path, every=100)
    made.step(record(1), Alone())
    assert steps(tmp_path / "metrics.jsonl") == [1]
    made.close()


def test_each_rank_writes_its_times_and_only_rank_0_the_metrics(tmp_path):
    run(tmp_path, [1, 2], rank=3)
    assert not (tmp_path / "metrics.jsonl").exists()
    assert not (tmp_path / "events.jsonl").exists()
    first, _ = read_lines(tmp_path / "ranks" / "3.jsonl")
    assert first.pop("memory_gib") > 0
    assert first == {
        "step": 1,
        "compute_s": 0.3,
        "comm_wait_s": 0.1,
        "data_wait_s": 0.05,
        "step_time_s": 0.5,
    }


def test_resuming_drops_the_lines_of_steps_that_will_be_done_again(tmp_path):
    run(tmp_path, range(1, 8))
    run(tmp_path, [5, 6], start=4)
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 5, 6]
    assert steps(tmp_path / "ranks" / "0.jsonl") == [1, 2, 3, 4, 5, 6]


def test_starting_anew_drops_every_line(tmp_path):
    run(tmp_path, range(1, 4))
    run(tmp_path, [1], start=0)
    assert steps(tmp_path / "metrics.jsonl") == [1]


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"st', "{", '{"epoch": 3}'])
def test_resuming_drops_a_line_cut_short(tmp_path, torn):
    run(tmp_path, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    whole = path.read_text().splitlines()[:2]
    path.write_text("\n".join(whole) + "\n" + torn)
    run(tmp_path, [3], start=2)
    assert steps(path) == [1, 2, 3]


def test_a_last_line_that_lacks_only_its_end_is_kept(tmp_path):
    run(tmp_path, [1, 2])
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().rstrip("\n"))
    run(tmp_path, [3], start=2)
    assert steps(path) == [1, 2, 3]


def test_resuming_keeps_kept_lines_to_the_last_digit(tmp_path):
    run(tmp_path, [1, 2])
    before = (tmp_path / "metrics.jsonl").read_text()
    run(tmp_path, [], start=2)
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_the_balance_leaves_out_the_first_step_of_a_process(tmp_path):
    made = observer(tmp_path, every=2)
    made.step(record(1, compute_s=100.0), Twice())
    made.step(record(2), Twice())
    made.step(record(3), Twice())
    assert made.balance.steps == 1, "exchanged only every second step"
    made.step(record(4), Twice())
    assert made.balance.steps == 3
    assert made.balance.summary()["slowest_over_mean"] == pytest.approx(4 / 3)
    made.step(record(5), Twice())
    made.flush(Twice())
    made.flush(Twice())
    assert made.balance.steps == 4
    made.close()


def test_ranks_that_lived_different_steps_do_not_pass_unnoticed(tmp_path):
    made = observer(tmp_path)
    made.step(record(1), Alone())
    made.step(record(2), Alone())

    class Uneven:
        def gather(self, value):
            return [value, []]

    with pytest.raises(ValueError, match="shorter"):
        made.flush(Uneven())


def test_events_are_appended_and_carry_their_time(tmp_path):
    made = observer(tmp_path)
    made.event("started", step=0, steps=5, world=2)
    made.evaluation(5, "validation", {"wer": 0.25})
    first, second = read_lines(tmp_path / "events.jsonl")
    assert (first["event"], first["steps"]) == ("started", 5)
    assert first["time"] <= second["time"]
    assert (second["event"], second["scores"]) == ("evaluation", {"wer": 0.25})
    made.close()


def test_a_stop_is_seen_by_rank_0(tmp_path):
    first, other = observer(tmp_path), observer(tmp_path, rank=1)
    assert not first.stop_requested()
    (tmp_path / STOP_FILE).touch()
    assert first.stop_requested()
    assert not other.stop_requested()


def test_a_skipped_step_leaves_null_where_json_has_no_number(tmp_path):
    made = observer(tmp_path)
    made.step(record(1, loss=math.nan, skipped=True), Alone())
    made.close()
    (line,) = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert line["loss"] is None
    assert line["skipped"] is True
