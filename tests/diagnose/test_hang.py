"""The rank that held the others up, found from what real ranks wrote (see hang_ranks.py)."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hang_ranks import GLOO_S, SCENES, SLEEP_S, STALL_S

from muster.diagnose import stall_files
from muster.diagnose.hang import Hang, analyse, last_line
from muster.observe import heartbeat
from muster.observe.heartbeat import GRACE_S, STALLED, TICK_S
from processes import run


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> dict[str, tuple[Path, dict[str, int], float | None]]:
    """Of each scene: its folder, the ranks' exit codes, and how long after a rank went astray, if one did,
    the first had ended."""
    root = tmp_path_factory.mktemp("scenes")
    script = Path(__file__).with_name("hang_ranks.py")
    done = run([sys.executable, script, root])
    report = json.loads(done.stdout)
    return {
        scene: (root / scene, report[scene]["codes"], report[scene]["seconds"]) for scene in SCENES
    }


def found(scenes, scene: str) -> Hang:
    hang = analyse(scenes[scene][0], SCENES[scene])
    assert hang is not None
    return hang


SMALL = "all_reduce number 13 of group gloo:0 (Float [2])"
GATHER = "all_gather number 1 of group gloo:1 (Long [1])"


@pytest.mark.parametrize(
    ("scene", "rank", "state", "collective", "code"),
    [
        ("sleep", 1, "stuck", SMALL, "in sleeps: time.sleep"),
        ("stopped", 1, "stopped", SMALL, None),
        ("auto stopped", 1, "stopped", SMALL, None),
        ("killed", 1, "gone", SMALL, None),
        ("native", 1, "native", SMALL, "in holds_the_interpreter"),
        ("slow", 1, "slow", SMALL, "in is_slow: time.sleep"),
        ("skip", 1, "mismatch", "all_gather number 16 of group gloo:0 (Float [3])", "in one_step"),
        ("skip of three", 2, "mismatch", "all_gather number 16 of group gloo:0 (Float [3])", None),
        ("message", 1, "stuck", "recv", "in sleeps: time.sleep"),
        ("other group", 1, "elsewhere", "all_reduce number 1 of group gloo:1 (Float [1])", "play"),
        ("background", 1, "stuck", SMALL, "in sleeps: time.sleep"),
        ("background waited for", 1, "stuck", GATHER, "in sleeps: time.sleep"),
        ("start", 1, "stuck", "all_reduce number 1 of group gloo:0 (Float [7])", "in sleeps"),
        ("alone", 0, "stuck", None, "in sleeps: time.sleep"),
        ("save to a dead disk", 0, "stuck", None, "in _join: thread.join"),
    ],
)
def test_the_rank_the_collective_and_the_line_are_named(
    scenes, scene, rank, state, collective, code
):
    hang = found(scenes, scene)
    assert (hang.rank, hang.state, hang.collective) == (rank, state, collective), hang
    assert hang.words.startswith(f"Rank {rank} on {os.uname().nodename}")
    assert hang.waiting == [r for r in range(SCENES[scene]) if r != rank]
    if code is not None:
        assert code in (hang.line or "")
        assert ".py:" in (hang.line or "")
        assert (hang.line or "") in hang.words


def test_a_rank_that_skipped_is_told_what_and_where_and_what_it_called_instead(scenes):
    words = found(scenes, "skip").words
    assert "called all_reduce number 16 of group gloo:0 (Float [2]) instead" in words
    assert "in one_step: dist.all_gather(" in words


def test_the_one_that_went_astray_is_named_when_gloo_ends_the_other(scenes):
    _, codes, _ = scenes["crash of the other"]
    assert codes["0"] == -6
    hang = found(scenes, "crash of the other")
    assert (hang.rank, hang.state) == (1, "mismatch")
    assert "Float [5000]) where all_reduce Float [2] was due" in hang.words


def test_the_one_that_went_astray_is_named_when_gloo_ends_it(scenes):
    folder, codes, _ = scenes["crash"]
    assert codes["1"] == -6
    hang = found(scenes, "crash")
    assert (hang.rank, hang.state) == (1, "mismatch")
    assert "in one_step" in (last_line(folder, 1) or "")


@pytest.mark.parametrize("scene", ["calm", "auto slow", "own failure", "save to a slow disk"])
def test_there_is_no_hang_in_a_run_that_goes_on_or_fails_by_itself(scenes, scene):
    folder, codes, _ = scenes[scene]
    assert analyse(folder, SCENES[scene]) is None
    assert STALLED not in codes.values()


def test_stalled_ranks_leave_with_their_code_within_the_limit(scenes):
    for scene in ("sleep", "skip", "skip of three", "slow", "message", "other group", "alone"):
        _, codes, seconds = scenes[scene]
        assert set(codes.values()) == {STALLED}, scene
        busy = 10.0  # of a machine, at the worst moment; gloo's own limit comes much later
        assert seconds < SLEEP_S + STALL_S + 2 * TICK_S + GRACE_S + busy < GLOO_S, scene


def test_by_default_a_stopped_rank_ends_the_run_at_the_limit_within_steps(scenes):
    _, codes, seconds = scenes["auto stopped"]
    assert codes["0"] == STALLED
    assert seconds < SLEEP_S + STALL_S + 2 * TICK_S + GRACE_S + 10.0 < GLOO_S


def test_no_stall_is_counted_before_the_first_beat(scenes):
    folder, codes, _ = scenes["start"]
    assert codes["0"] == 1  # gloo's own limit ended it
    assert json.loads((folder / "ranks" / "0.stall.json").read_text())["why"] == "failed"


def test_every_stalled_rank_leaves_its_stacks_and_its_flight_recorder(scenes):
    ranks = scenes["sleep"][0] / "ranks"
    for rank in range(2):
        assert "Thread MainThread" in (ranks / f"{rank}.stacks.txt").read_text()
        flight = json.loads((ranks / f"{rank}.flight.json").read_text())
        assert flight["groups"]["0"] == [0, 1]
        assert len(flight["entries"]) == 13 - rank


def write_report(folder: Path, rank: int, seconds: float, flight: list[dict[str, Any]]) -> None:
    ranks = folder / "ranks"
    ranks.mkdir(exist_ok=True)
    thread = flight[0]["thread_id"]
    at = {"file": "/home/me/train.py", "line": 7, "function": "step", "code": "loss.item()"}
    report = {"rank": rank, "host": f"node{rank}", "step": 4, "phase": "optimizer step"}
    report |= {"why": "stalled", "seconds": seconds, "thread": thread, "lines": [at], "call": None}
    report["lost"] = False
    (ranks / f"{rank}.stall.json").write_text(json.dumps(report))
    groups = {"0": [0, 1], "2": [0, 1]}
    text = json.dumps({"entries": flight, "groups": groups})
    (ranks / f"{rank}.flight.json").write_text(text)


@pytest.fixture
def nccl() -> list[dict[str, Any]]:
    """What torch 2.11 wrote on an H200 with NCCL 2.28, two all-reduces behind a busy stream."""
    path = Path(__file__).with_name("nccl_trace.json")
    return list(json.loads(path.read_text())["entries"])


def test_on_gpus_the_rank_that_did_not_launch_the_kernel_is_named(tmp_path, nccl):
    write_report(tmp_path, 0, 60.0, nccl)
    write_report(tmp_path, 1, 61.0, nccl[:-2])
    hang = analyse(tmp_path, 2)
    assert hang is not None
    assert (hang.rank, hang.host, hang.state) == (1, "node1", "stuck")
    assert hang.collective == "all_reduce number 4 of group nccl:0 (Float [6])"


def test_on_gpus_a_rank_that_launched_another_kernel_is_named(tmp_path, nccl):
    """Two ranks, no majority: in the steps before, an all-gather came after the all-reduce."""
    skipped = [*nccl[:-2], {**nccl[-2], "input_sizes": [[5000]]}]
    write_report(tmp_path, 0, 60.0, [*nccl[:-2], {**nccl[-2], "input_sizes": [[9]]}])
    write_report(tmp_path, 1, 61.0, skipped)
    hang = analyse(tmp_path, 2)
    assert hang is not None
    assert (hang.rank, hang.state) == (0, "mismatch")


def test_when_all_ranks_arrived_it_is_the_network(tmp_path, nccl):
    write_report(tmp_path, 0, 60.0, nccl)
    write_report(tmp_path, 1, 60.0, nccl)
    hang = analyse(tmp_path, 2)
    assert hang is not None
    assert (hang.rank, hang.state) == (None, "network")
    assert "all_reduce number 4" in hang.words
    assert "node0, node1" in hang.words


def test_what_an_earlier_attempt_wrote_is_cleared_away(tmp_path):
    (tmp_path / "ranks").mkdir()
    written = ["0.stall.json", "1.stacks.txt", "1.flight.json", "0.heartbeat.json", "stalled"]
    written.append("stalled-0a1b2c3d")
    for name in (*written, "0.log"):
        (tmp_path / "ranks" / name).touch()
    heartbeat.clear(tmp_path)
    assert [p.name for p in (tmp_path / "ranks").iterdir()] == ["0.log"]


def test_ranks_of_another_attempt_call_nobody_and_blame_nobody(tmp_path, monkeypatch):
    """Those of a node that was taken for lost may still run, and stall."""
    monkeypatch.setattr(heartbeat, "TICK_S", 1000.0)
    heartbeat.start(tmp_path, 0, 1000.0, attempt="new")
    for name in ("stalled", "stalled-old"):
        (tmp_path / "ranks" / name).touch()
    assert heartbeat._active._why_to_exit() is None
    (tmp_path / "ranks" / "stalled-new").touch()
    assert heartbeat._active._why_to_exit() == "called"
    (tmp_path / "ranks" / "stalled-new").unlink()
    lost = RuntimeError("gloo: connection closed by peer")
    reporting = threading.Thread(
        target=heartbeat.failed, args=(lost,)
    )  # it ignores no signal there
    reporting.start()
    reporting.join()
    heartbeat.stop()
    assert analyse(tmp_path, 1, "new") is not None
    assert analyse(tmp_path, 1, "newer") is None


def test_a_sign_of_life_shows_the_step_and_the_phase(tmp_path):
    heartbeat.start(tmp_path, 3, None)
    heartbeat.beat("evaluation", 12)
    heartbeat.beat("saving")
    heartbeat.stop()
    sign = json.loads((tmp_path / "ranks" / "3.heartbeat.json").read_text())
    assert (sign["rank"], sign["step"], sign["phase"]) == (3, 12, "ended")
    assert abs(sign["time"] - time.time()) < 60


def test_a_beat_costs_next_to_nothing(tmp_path):
    heartbeat.start(tmp_path, 0, None)
    begin = time.thread_time()  # which other threads and programs do not add to
    for step in range(100_000):
        heartbeat.beat("forward and backward", step)
    each = (time.thread_time() - begin) / 100_000
    heartbeat.stop()
    assert each < 5e-6  # about 0.3 µs; the rest is room for a slow machine


def test_stacks_of_one_long_line_are_read_in_one_pass(tmp_path):
    path = tmp_path / "0.stacks.txt"
    path.write_text("Thread 0x1 (most recent call first):\n" + 'File "' * 30_000)
    begin = time.process_time()
    assert stall_files.read(tmp_path, 0).native is None
    assert time.process_time() - begin < 0.5
    path.write_text('Current thread 0x1:\n  File "/a b.py", line 3 in f\n' + "x" * 2**21)
    assert stall_files.read(tmp_path, 0).native == "/a b.py:3 in f"
