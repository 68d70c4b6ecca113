"""Restarts and resumes of a run, from its events."""

from muster.observe.events import count_words, restarts_in, write_again
from muster.observe.results import read_lines

KILLED = {"event": "restarting", "time": 1.0, "rank": 2, "signal": "SIGKILL", "step": 7}
SHRUNK = {"event": "shrunk", "time": 2.0, "words": "out of memory", "restart": True}
STOPPED = {"event": "continuing", "time": 3.0, "step": 9, "why": "it was stopped"}


def started(step: int) -> dict:
    return {"event": "started", "time": 0.0, "step": step}


def test_a_run_without_a_second_start_has_no_restarts():
    assert restarts_in([started(0), {"event": "checkpoint", "step": 4}]) == []
    assert restarts_in([started(0), SHRUNK | {"restart": False}]) == []


def test_each_restart_has_its_reason_and_where_it_went_on():
    events = [started(0), KILLED, started(6), SHRUNK, started(8), STOPPED, started(9)]
    found = restarts_in(events)
    assert [(r.kind, r.step, r.from_step) for r in found] == [
        ("restarted", 7, 6),
        ("restarted", None, 8),
        ("resumed", 9, 9),
    ]
    assert found[0].words() == "at step 7 rank 2 was killed by SIGKILL; went on from step 6"
    assert found[2].words() == "resumed; at step 9 it was stopped; went on from step 9"
    assert count_words(found) == ["2 restarts", "1 resume"]
    assert count_words([]) == []


def test_ranks_that_are_killed_again_before_they_train_count_twice():
    found = restarts_in([started(0), KILLED, KILLED | {"time": 5.0}, started(0)])
    assert [(r.time, r.from_step) for r in found] == [(1.0, 0), (5.0, 0)]
    assert found[0].words().endswith("; began again at step 0")
    (waiting,) = restarts_in([started(0), KILLED])
    assert waiting.words().endswith("; not training again yet")


def test_a_start_that_an_older_version_recorded_is_counted_too():
    (found,) = restarts_in([started(0), started(4)])
    assert (found.kind, found.step, found.from_step) == ("resumed", None, 4)
    older = {key: value for key, value in KILLED.items() if key != "step"}
    (found,) = restarts_in([started(0), older, started(6)])
    assert found.words() == "rank 2 was killed by SIGKILL; went on from step 6"


def test_how_a_run_ended_before_is_written_when_it_is_started_again(tmp_path):
    write_again(tmp_path, "starting", {}, False)
    assert list(tmp_path.iterdir()) == []  # nothing has begun
    (tmp_path / "events.jsonl").touch()
    (tmp_path / "metrics.jsonl").write_text('{"step": 12}\n')
    write_again(tmp_path, "failed", {"what": "Rank 1: KeyError: 'a'\nmore"}, False)
    write_again(tmp_path, "running", {}, False)
    write_again(tmp_path, "stopped", {}, True)
    said = [(event["step"], event["why"]) for event in read_lines(tmp_path / "events.jsonl")]
    assert said == [
        (12, "Rank 1: KeyError: 'a'"),
        (12, "its processes were gone (killed, or the machine went down)"),
        (12, "a signal asked it to stop"),
    ]
