"""The live table of ranks, and the log beside it, read from the run's files."""

import json
import os
import time
from types import SimpleNamespace

import pytest

from muster.observe import console as shown
from muster.observe.console import Log, event_words, follow
from muster.observe.ranks import MOST, RankTable
from muster.observe.terminal import Terminal
from muster.run_directory import Run

STEP = {"loss": 1.25, "grad_norm": 0.5, "lr": 1e-3, "samples_per_s": 64.0, "step_time_s": 0.5}


NOW = time.time()


@pytest.fixture(autouse=True)
def frozen(monkeypatch):
    """What is written is as old as it says, however late it is read."""
    clock = SimpleNamespace(time=lambda: NOW, monotonic=time.monotonic)
    monkeypatch.setattr("muster.observe.heartbeats.time", clock)


def write(
    folder, rank, *, step=7, phase="optimizer step", age=0.0, since=0.0, compute=0.25
) -> None:
    folder.mkdir(exist_ok=True)
    now = NOW - age
    sign = {"rank": rank, "host": f"node-{rank // 2}", "pid": 1, "step": step, "phase": phase}
    sign |= {"since": now - since, "time": now}
    (folder / f"{rank}.heartbeat.json").write_text(json.dumps(sign))
    times = {
        "step": (step or 7) - 1,
        "compute_s": compute,
        "comm_wait_s": 0.125,
        "data_wait_s": 0.003,
    }
    line = {**times, "step_time_s": 0.4, "memory_gib": 1.5}
    (folder / f"{rank}.jsonl").write_text(f'{{"step": 1}}\n{json.dumps(line)}\n{{"ste')


def text_of(thing) -> str:
    console = Terminal(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(thing)
    return console.export_text()


def test_each_rank_has_host_step_phase_times_and_memory(tmp_path):
    write(tmp_path, 0)
    write(tmp_path, 10, phase="forward and backward", compute=0.5)
    (tmp_path / "0.error.json").write_text("{}")
    (tmp_path / "0.log").touch()
    text = text_of(RankTable(tmp_path).table())
    lines = [" ".join(line.split()) for line in text.splitlines() if line]
    assert lines[0] == "rank host step phase compute ms wait ms data ms GiB"
    assert lines[1] == "0 node-0 7 optimizer step 250 125 3 1.50"
    assert lines[2] == "10 node-5 7 forward and backward 500 125 3 1.50"
    assert RankTable(tmp_path).lines()[0] == (
        "rank 0  host node-0  step 7  phase optimizer step  compute ms 250  wait ms 125  data ms 3  "
        "GiB 1.50"
    )


def test_a_rank_that_stands_still_or_is_silent_shows(tmp_path):
    write(tmp_path, 0, since=30)
    write(tmp_path, 1, age=60)
    still, silent = (row.phase for row in RankTable(tmp_path).rows())
    assert still == "optimizer step for 30 s"
    assert silent == "no heartbeat for 60 s"


def test_a_rank_that_has_only_started_has_empty_cells(tmp_path):
    write(tmp_path, 0)
    (tmp_path / "0.jsonl").unlink()
    (tmp_path / "1.jsonl").touch()
    first, second = RankTable(tmp_path).rows()
    assert (first.times, first.step, first.phase) == (None, 7, "optimizer step")
    assert (second.times, second.step, second.phase) == (None, None, "")
    assert RankTable(tmp_path).lines()[1] == "rank 1"


def test_of_many_ranks_the_slowest_are_shown(tmp_path):
    for rank in range(MOST + 4):
        write(tmp_path, rank, compute=0.1 if rank in (2, 5, 6, 9) else 0.5)
    text = text_of(RankTable(tmp_path).table())
    ranks = [int(line.split()[0]) for line in text.splitlines() if line[:1].isdigit()]
    assert ranks == [r for r in range(MOST + 4) if r not in (2, 5, 6, 9)]
    assert f"the slowest {MOST} of {MOST + 4} ranks" in text


def test_a_log_begins_near_its_end_and_gives_each_whole_line_once(tmp_path):
    path = tmp_path / "0.log"
    log = Log(path, end=25)
    assert log.new() == []
    path.write_text("".join(f"line {i}\n" for i in range(100)))
    assert log.new() == ["line 97", "line 98", "line 99"]
    with path.open("a") as file:
        file.write("one more\nand ha")
    assert log.new() == ["one more"]
    with path.open("a") as file:
        file.write("lf\n")
    assert log.new() == ["and half"]
    assert log.new() == []


def test_what_an_earlier_start_left_is_not_shown(tmp_path, monkeypatch):
    run = Run(tmp_path)
    write(tmp_path / "ranks", 0)
    write(tmp_path / "ranks", 1)
    log = tmp_path / "ranks" / "0.log"
    log.write_text("of the first start\n")
    run.begin()
    table = RankTable(tmp_path / "ranks")
    assert table.lines() == []
    run.update(ranks=1, state="running")
    assert table.lines() == ["rank 0"]
    write(tmp_path / "ranks", 0, step=None)
    write(tmp_path / "ranks", 1)  # of a machine that was taken for lost
    (row,) = table.rows()
    assert (row.step, row.times) == (None, None)
    with log.open("a") as file:
        file.write("of this start\n")
    out = (tmp_path / "out").open("w+")
    follow(tmp_path, lambda: "stopped", Terminal(file=out), table)
    out.seek(0)
    assert out.read() == "of this start\n"
    states = iter(["queued", "stopped"])
    monkeypatch.setattr(shown, "POLL_S", 0.0)
    out.truncate(0)
    follow(tmp_path, lambda: next(states), Terminal(file=out), table)
    out.seek(0)
    assert "of the first start" not in out.read()


def test_following_with_ranks_shows_them_and_the_log_with_and_without_a_terminal(tmp_path):
    write(tmp_path / "ranks", 0)
    (tmp_path / "ranks" / "0.log").write_text("[Rank 0] [/odd] words\n")
    (tmp_path / "events.jsonl").write_text(
        json.dumps({"event": "started", "step": 0, "steps": 9, "world": 1}) + "\n"
    )
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 4, **STEP}) + "\n")
    for terminal in (False, True):
        file = (tmp_path / "out").open("w+")
        console = Terminal(width=200, file=file, force_terminal=terminal)
        follow(tmp_path, lambda: "stopped", console, RankTable(tmp_path / "ranks"))
        file.seek(0)
        written = file.read()
        assert "[Rank 0] [/odd] words" in written
        assert "step 4/9" in written
        assert "node-0" in written
        assert "optimizer step" in written


def test_a_queued_run_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(shown, "POLL_S", 0.0)
    states = iter(["queued", "starting", "finished"])
    console = Terminal(file=open(os.devnull, "w"))  # noqa: SIM115
    assert follow(tmp_path, lambda: next(states), console) == "finished"


def test_a_smaller_micro_batch_is_told():
    words = "out of memory at step 7 on rank 1: 8 → 4 samples at a time"
    assert event_words({"event": "shrunk", "words": words, "restart": False}) == words
    restart = event_words({"event": "shrunk", "words": words, "restart": True})
    assert restart == f"{words}; all ranks restart from the last checkpoint"


def test_a_heartbeat_with_the_line_of_its_step_needs_no_other_file(tmp_path):
    write(tmp_path, 3)
    path = tmp_path / "3.heartbeat.json"
    line = json.loads((tmp_path / "3.jsonl").read_text().splitlines()[1])
    path.write_text(json.dumps({**json.loads(path.read_text()), "line": line}))
    before = text_of(RankTable(tmp_path).table())
    assert "250" in before
    (tmp_path / "3.jsonl").unlink()
    assert text_of(RankTable(tmp_path).table()) == before
    path.write_text(json.dumps({**json.loads(path.read_text()), "line": {"compute_s": "1"}}))
    assert "250" not in text_of(RankTable(tmp_path).table())
