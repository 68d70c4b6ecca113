"""Runs with `--nodes MIN:MAX`: hosts are lost, come back, and the losses stay those of an undisturbed run."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hosts import Host, hosts, needs_namespaces  # noqa: F401
from muster import run_directory
from muster.observe.events import EVENTS_FILE
from muster.observe.results import REGROUP_FILE, complete_steps, read_lines
from muster.run_directory import Run
from processes import python_path, until
from tiny import HELD, losses

pytestmark = [needs_namespaces, pytest.mark.timeout(240)]

STEPS, EVERY = 16, 4
# Runs in every process before its program: a lost node is noticed soon.
IMPATIENT = """
import sys
if "muster.launch.local" in sys.orig_argv:
    from muster.launch import membership, nodes
    nodes.HEARTBEAT_S, nodes.SILENT_S = 0.2, {silent_s}
    membership.SILENT_S, membership.GATHER_S = {silent_s}, 60.0
"""


class Elastic:
    """An elastic run of the tiny recipe on two hosts, which waits after `hold` steps for the file `go`."""

    def __init__(self, pair: tuple[Host, Host], recipe: str, folder: Path) -> None:
        self.hosts, self.recipe, self.folder = pair, recipe, folder
        self.go = folder / "go"
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def prepare(self, hold: int, silent_s: float = 1.5) -> None:
        text = HELD.format(steps=hold, go=str(self.go)) + IMPATIENT.format(silent_s=silent_s)
        (self.folder / "sitecustomize.py").write_text(text)

    def start(
        self, host: Host, *words: str, master: Host | None = None, what: str | None = None
    ) -> subprocess.Popen[str]:
        where = [
            "--nodes",
            "1:2",
            "--gpus",
            "1",
            "--master-addr",
            (master or self.hosts[0]).address,
        ]
        keys = [f"training.steps={STEPS}", f"checkpoint.every_steps={EVERY}", *words]
        keys = [] if what else keys
        process = host.muster(
            "train",
            what or self.recipe,
            *keys,
            *where,
            folder=self.folder,
            **python_path(self.folder),
        )
        self.processes[host.name] = process
        return process

    @property
    def run(self) -> Run:
        return run_directory.find("latest", self.folder / "runs")

    def reached(self, steps: int) -> None:
        until(lambda: (self.folder / "runs" / "latest").exists() and len(losses(self.run)) >= steps)

    def saved(self, step: int) -> None:
        self.reached(step)
        until(lambda: step in complete_steps(self.run.path))

    def events(self, *names: str) -> list[dict]:
        return [e for e in read_lines(self.run.path / EVENTS_FILE) if e["event"] in names]

    def wait_for(self, name: str, count: int = 1) -> None:
        until(lambda: len(self.events(name)) >= count)

    def lose(self, host: Host) -> None:
        """All of its processes end at once, as when its power fails."""
        found = subprocess.run(
            ["ip", "netns", "pids", host.namespace], capture_output=True, text=True
        )
        subprocess.run(["kill", "-9", *found.stdout.split()], check=True)
        self.processes.pop(host.name).wait()

    def finished(self) -> list[str]:
        said = [process.communicate(timeout=120)[0] for process in self.processes.values()]
        assert [process.returncode for process in self.processes.values()] == [0] * len(said), said
        assert self.run.state() == "finished"
        return said


@pytest.fixture
def elastic(hosts, recipe, tmp_path) -> Elastic:  # noqa: F811
    return Elastic(hosts, recipe, tmp_path)


def assert_as_alone(run: Run, undisturbed: Callable[[int], list[dict[str, float]]]) -> None:
    """Every step once, with the same samples; sums in another order are all that differs."""
    lines, alone = read_lines(run.path / "metrics.jsonl"), undisturbed(1)[:STEPS]
    for name in ("step", "epoch", "samples"):
        assert [line[name] for line in lines] == [line[name] for line in alone]
    for name, rel in (("loss", 1e-5), ("grad_norm", 1e-4)):
        assert [line[name] for line in lines] == pytest.approx(
            [line[name] for line in alone], rel=rel
        )


def test_a_host_is_lost_and_taken_in_again_at_the_next_checkpoint(elastic, undisturbed):
    a, b = elastic.hosts
    elastic.prepare(hold=10)
    elastic.start(a), elastic.start(b)
    elastic.saved(4)
    elastic.lose(b)
    elastic.wait_for("world", 2)
    elastic.reached(9)
    elastic.start(b, what="runs/latest")
    until((elastic.run.path / REGROUP_FILE).exists)
    elastic.go.touch()
    said = elastic.finished()
    assert_as_alone(elastic.run, undisturbed)
    (lost,) = elastic.events("node_lost")
    assert lost["host"] == "host-b"
    assert [e["hosts"] for e in elastic.events("node_joined")] == [["host-b"]]
    assert [w["ranks"] for w in elastic.run.results()["worlds"]] == [2, 1, 2]
    assert [w["step"] for w in elastic.run.results()["worlds"]] == [0, 4, 12]
    assert "host-b is lost at step" in said[0]
    assert "2 rank(s) instead of 1 on 2 of at most 2 node(s): host-a, host-b" in said[0]
