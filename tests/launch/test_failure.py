"""Which rank's error is reported when several fail at once, with its cause and cure."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from muster.errors import LaunchError
from muster.launch import cluster, failure, secret
from muster.launch.process import record_error
from muster.observe.failure import failure_panel
from muster.run_directory import Run


def leave(folder: Path, rank: int, time: float, expected: bool, message: str) -> None:
    (folder / "ranks").mkdir(exist_ok=True)
    words = {"rank": rank, "time": time, "expected": expected, "kind": "E", "message": message}
    words["host"] = "host-b"
    (folder / "ranks" / f"{rank}.error.json").write_text(json.dumps(words))


def test_a_killed_rank_comes_before_the_complaints_of_the_others(tmp_path):
    leave(tmp_path, 0, 1.0, False, "connection closed by peer")
    found = failure.collect(tmp_path, {0: 1, 1: -9}, 2)
    assert (found["rank"], found["signal"]) == (1, "SIGKILL")
    assert "ran out of host memory" in found["cause"]


def test_the_kernels_own_count_tells_a_memory_kill_from_any_other(tmp_path, monkeypatch):
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 1\noom_kill 3\n")
    monkeypatch.setattr(failure, "OOM_EVENTS", events)
    assert (
        "out-of-memory (OOM) killer ended it" in failure.collect(tmp_path, {1: -9}, 2, 2)["cause"]
    )
    assert "If nobody sent it by hand" in failure.collect(tmp_path, {1: -9}, 2, 3)["cause"]


def test_a_sentence_meant_for_the_user_comes_before_an_earlier_trace(tmp_path):
    leave(tmp_path, 0, 1.0, False, "connection closed by peer")
    leave(tmp_path, 1, 2.0, True, "no audio column")
    found = failure.collect(tmp_path, {0: 1, 1: 1}, 2)
    assert found["what"] == "no audio column"
    assert found["host"] == "host-b"


def test_the_earliest_trace_counts_and_not_the_last(tmp_path):
    leave(tmp_path, 0, 2.0, False, "connection closed by peer")
    leave(tmp_path, 1, 1.0, False, "boom")
    assert failure.collect(tmp_path, {0: 1, 1: 1}, 2)["what"] == "Rank 1: E: boom"


def test_what_ranks_of_another_attempt_say_does_not_count(tmp_path):
    (tmp_path / "ranks").mkdir()
    for attempt, words in (("", "none"), ("0ld", "old"), ("new", "new")):
        record_error(tmp_path, 0, LaunchError(words), attempt)
    assert failure.collect(tmp_path, {0: 1}, 1, attempt="new")["what"] == "new"
    assert "no error report" in failure.collect(tmp_path, {0: 1}, 1, attempt="newer")["what"]
    run = Run(tmp_path)
    run.clear_error_reports()
    assert "no error report" in failure.collect(tmp_path, {0: 1}, 1)["what"]


def test_the_supervisor_and_its_ranks_name_an_attempt_alike(monkeypatch):
    monkeypatch.setenv(secret.VARIABLE, "00" * 32)
    found = {}
    for number in (1, 2):
        run_id = f"speech.{secret.start_name()}.{number}"
        env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": run_id}
        env |= {"TORCHELASTIC_RESTART_COUNT": "0", "MASTER_ADDR": "node1", "MASTER_PORT": "1"}
        found[number] = cluster.detect(env).attempt
        assert found[number] == cluster.attempt_name(f"{run_id}/0")
    assert len(set(found.values())) == 2
    assert cluster.detect({}).attempt == ""
    before = secret.start_name()
    monkeypatch.setenv(secret.VARIABLE, "01" * 32)
    assert secret.start_name() != before


def test_an_abort_is_not_believed_before_the_words_of_a_rank(tmp_path):
    assert failure.collect(tmp_path, {1: -6}, 2)["signal"] == "SIGABRT"
    leave(tmp_path, 0, 1.0, True, "row 3 is broken")
    assert failure.collect(tmp_path, {0: 1, 1: -6}, 2)["what"] == "row 3 is broken"


@pytest.mark.parametrize(("code", "signal"), [(-15, "SIGTERM"), (3, None)])
def test_without_words_the_exit_code_speaks(tmp_path, code, signal):
    found = failure.collect(tmp_path, {0: code}, 1)
    assert (found["exit_code"], found["signal"], found["error"]) == (code, signal, None)


def test_of_several_nodes_a_silent_one_comes_first_then_a_kill_then_the_earliest(tmp_path):
    leave(tmp_path, 0, 5.0, False, "closed")
    late = failure.collect(tmp_path, {0: 1}, 4)
    leave(tmp_path, 0, 1.0, False, "boom")
    early = failure.collect(tmp_path, {0: 1}, 4)
    killed = failure.collect(tmp_path, {2: -11}, 4)
    silent = failure.lost_node(1, "host-b", 20.0)
    aborted = failure.collect(tmp_path / "elsewhere", {3: -6}, 4)
    assert failure.first([late, early]) is early
    leave(tmp_path, 0, 9.0, True, "row 3 is broken")
    assert (
        failure.first([aborted, failure.collect(tmp_path, {0: 1}, 4)])["what"] == "row 3 is broken"
    )
    assert failure.first([early, killed]) is killed
    assert failure.first([killed, silent]) is silent


def shown(found: failure.Failure, folder: str = "runs/x") -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(failure_panel(found, folder))
    return console.export_text()


def test_the_panel_says_how_to_go_on_where_something_was_saved(tmp_path):
    for step in (10, 20, 30):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    for step in (10, 20):
        (tmp_path / "checkpoints" / f"step-{step}" / "manifest.json").touch()
    found = failure.collect(tmp_path, {1: -9}, 2)
    assert f"to go on from step 20: muster train {tmp_path}" in shown(found, str(tmp_path))
    assert "to go on" not in shown(found)


def test_the_panel_says_what_why_what_to_do_and_where(tmp_path):
    words = shown(failure.collect(tmp_path, {1: -9}, 2))
    for part in (
        "the run failed",
        "Rank 1 was killed by SIGKILL",
        "likely cause:",
        "what to do: Use a smaller training.per_device_batch_size",
        "rank 1 on",
        "runs/x/ranks/1.log",
    ):
        assert part in words


def test_the_brackets_of_a_torch_error_survive_in_the_panel(tmp_path):
    message = "[/pytorch/third_party/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:39313"
    leave(tmp_path, 1, 1.0, False, message)
    assert message in shown(failure.collect(tmp_path, {1: 1}, 2))


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (OSError("no space"), False, "The launcher: OSError: no space"),
        (LaunchError("node 1 did not come"), True, "node 1 did not come"),
    ],
)
def test_a_launcher_that_breaks_is_told_of_too(error, expected, words):
    text = shown(failure.of_launcher(error, expected))
    assert words in text
    assert "runs/x/launcher.log" in text
