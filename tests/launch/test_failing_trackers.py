"""Whole runs whose trackers hang, fail and are killed with their rank."""

from __future__ import annotations

import json
import socket

import psutil
import pytest

import tiny
from muster import run_directory
from muster.observe import heartbeats
from muster.observe.results import read_lines
from processes import MUSTER, runs_module, start, until

TRACKERS = """
import json, time
import muster

class Lines(muster.Tracker):
    def start(self, run):
        self.file = open(run.folder.parent / "calls.jsonl", "a", buffering=1)
        self.write("start", run.id, run.step, run.recipe["training"]["lr"])
        return "the first"

    def metrics(self, step, values):
        self.write("metrics", step, values)

    def finish(self, status):
        self.write("finish", status)

    def write(self, *what):
        print(json.dumps(what), file=self.file)

class Hangs(Lines):
    def metrics(self, step, values):
        time.sleep(600)

class Raises(muster.Tracker):
    def start(self, run):
        raise SystemExit("no licence")
"""
SHORT_END = """
    from muster.observe.trackers import trackers
    trackers.END_S = 1.0
"""


@pytest.mark.full
def test_trackers_that_hang_and_fail_change_nothing_and_a_killed_run_repeats_no_step(
    recipe, tmp_path, undisturbed
):
    go, calls = tmp_path / "go", tmp_path / "runs" / "calls.jsonl"
    env = tiny.held_after(9, tmp_path, go)
    with (tmp_path / "sitecustomize.py").open("a") as file:
        file.write(SHORT_END)
    (tmp_path / "mine.py").write_text(TRACKERS)
    names = ",".join(f"mine.py:{name}" for name in ("Lines", "Hangs", "Raises"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        words = [recipe, f"logging.to=[{names}]", f"logging.prometheus={port}", "--gpus", "2"]
        process = start([*MUSTER, "train", *words], tmp_path, env=env)
        until(lambda: calls.exists() and '"metrics", 9' in calls.read_text())
        run = run_directory.find("latest", tmp_path / "runs")
        pids = {beat["pid"] for beat in heartbeats.read(run.path / "ranks").values()}
        assert len(pids) == 2
        pid = heartbeats.read(run.path / "ranks")[0]["pid"]
        assert runs_module(psutil.Process(pid), "muster.worker")
        psutil.Process(pid).kill()
        go.touch()
        told, _ = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert run.state() == "finished"
    assert tiny.losses(run) == [line["loss"] for line in undisturbed(2)[: tiny.STEPS]]

    made = [json.loads(text) for text in calls.read_text().splitlines()]
    starts = [call[1:] for call in made if call[0] == "start"]
    assert sorted(starts, key=str) == sorted(
        2 * [[None, 0, 1e-4]] + 2 * [["the first", 6, 1e-4]], key=str
    )
    sent = [(c[1], c[2]["train/loss"]) for c in made if c[0] == "metrics" and "train/loss" in c[2]]
    assert sent == list(enumerate(tiny.losses(run), 1))
    assert made[-1] == ["finish", "finished"]

    assert f"logging.prometheus: port {port} of 127.0.0.1 cannot be served" in told
    assert (
        "mine.py:Raises could not start, and the run goes on without it: SystemExit: no licence"
        in told
    )
    assert "mine.py:Hangs did not get all of " in told
    assert "it did not end within 1 s" in told
    (restart,) = [e for e in read_lines(run.path / "events.jsonl") if e["event"] == "restarting"]
    assert restart["step"] == 9
