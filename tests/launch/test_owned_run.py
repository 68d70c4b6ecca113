"""A run that another start has taken over: its former owner changes nothing in it."""

from __future__ import annotations

import psutil
import pytest

from muster import run_directory
from muster.launch import local, secret
from muster.launch.cluster import Node
from muster.launch.owned_run import OwnedRun, ReplacedError, is_owner
from muster.observe import storage
from muster.run_directory import Run
from processes import MUSTER, lives, start, until


@pytest.fixture
def run(tmp_path) -> Run:
    return run_directory.create(tmp_path / "runs", "speech", {})


def test_of_two_owners_the_later_one_writes(run):
    former = OwnedRun.take(run)
    former.update(state="running")
    latter = OwnedRun.take(run)
    latter.update(ranks=2)
    before = run.info()
    with pytest.raises(ReplacedError, match=r"speech-.* has been taken over by process \d+ on "):
        former.update(state="failed")
    assert not is_owner(former)
    assert is_owner(latter)
    assert run.info() == before


def test_a_former_owner_that_fails_says_so_and_leaves_the_run_alone(run, monkeypatch, caplog):
    former = OwnedRun.take(run)
    drawn = b"1" * secret.BYTES
    secret.make(run.path, drawn)
    OwnedRun.take(run).update(state="running")
    secret.make(run.path)
    storage.reserve(run.path)

    def supervise(self: local.Supervisor) -> int:
        secret.remove(self.run.path, drawn)
        raise RuntimeError("the connection is gone")

    monkeypatch.setattr(
        local.Supervisor, "__init__", lambda self, run, *_: setattr(self, "run", run)
    )
    monkeypatch.setattr(local.Supervisor, "supervise", supervise)
    before = run.info()
    files = sorted(path.name for path in run.path.iterdir())
    assert local._guarded(former, 1, Node(), None) == 1
    assert "has been taken over" in caplog.text
    assert run.info() == before
    assert sorted(path.name for path in run.path.iterdir()) == files
    assert secret.FILE in files


def test_ranks_end_when_their_run_is_taken_over(recipe, tmp_path):
    """Within seconds, by whoever notes that the owner is alive."""
    words = ("train", recipe, "--gpus", "1", "training.steps=1000000")
    command = start([*MUSTER, *words], folder=tmp_path)
    try:
        runs = tmp_path / "runs"
        until(lambda: (runs / "latest").exists() and Run(runs / "latest").last_metrics())
        run = run_directory.find("latest", runs)
        owner = psutil.Process(run.info()["pid"])
        ranks = owner.children(recursive=True)
        assert ranks
        run.own()
        until(lambda: not any(lives(process.pid) for process in [owner, *ranks]))
        assert "has been taken over" in (run.path / "launcher.log").read_text()
        assert run.state() == "running", "as its new owner left it"
        assert not (run.path / "report.html").exists()
    finally:
        command.kill()
        command.wait()
