"""Runs with `--nodes MIN:MAX`: hosts are lost, come back, and the losses stay those of an undisturbed run."""

from __future__ import annotations

import random
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hosts import Host, hosts, needs_namespaces, network  # noqa: F401
from muster import run_directory
from muster.observe.events import EVENTS_FILE
from muster.observe.results import REGROUP_FILE, complete_steps, read_lines
from muster.run_directory import Run
from processes import python_path, until
from tiny import losses
from training import run_training

pytestmark = [needs_namespaces, pytest.mark.timeout(400)]

STEPS, EVERY = 16, 4
# Runs in every process before its program. A lost node is noticed soon, a lost owner of the run too. Ranks take no
# more steps than the file `steps` has, and saves do not begin while there is a file `held`.
HURRIED = """
import os, sys
if "muster.launch.local" in sys.orig_argv:
    from muster.launch import membership, nodes
    nodes.HEARTBEAT_S, nodes.SILENT_S = 0.2, {silent_s}
    membership.SILENT_S, membership.GATHER_S = {silent_s}, {gather_s}
if "train" in sys.orig_argv:
    from muster import run_directory
    run_directory.STALE_S = 6.0
if "RANK" in os.environ:
    import time
    import torch
    import torch.distributed.checkpoint as dcp
    really_step, really_save = torch.optim.AdamW.step, dcp.save
    def step(self, *args, **kwargs):
        taken = max((int(state["step"]) for state in self.state.values() if "step" in state), default=0)
        while taken >= int(open({folder!r} + "/steps").read()):
            time.sleep(0.02)
        return really_step(self, *args, **kwargs)
    def save(*args, **kwargs):
        while os.path.exists({folder!r} + "/held"):
            open({folder!r} + "/saving", "a").close()
            time.sleep(0.02)
        return really_save(*args, **kwargs)
    torch.optim.AdamW.step, dcp.save = step, save
"""
LIMIT_S = 180.0


class Elastic:
    """An elastic run of the tiny recipe with a rank on each host, of which one is enough."""

    def __init__(self, group: Sequence[Host], recipe: str, folder: Path, *keys: str) -> None:
        self.hosts, self.recipe, self.folder = group, recipe, folder
        self.keys = [f"training.steps={STEPS}", f"checkpoint.every_steps={EVERY}", *keys]
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.hurry(gather_s=60.0)
        self.allow(0)

    def hurry(self, gather_s: float) -> None:
        """What starts from now on; node 0 waits so long for more than the fewest."""
        text = HURRIED.format(silent_s=1.5, gather_s=gather_s, folder=str(self.folder))
        (self.folder / "sitecustomize.py").write_text(text)

    def allow(self, steps: int) -> None:
        """Ranks take so many, those before a checkpoint included, and wait."""
        (self.folder / "new").write_text(str(steps))
        (self.folder / "new").rename(self.folder / "steps")

    def start(self, host: Host, what: str | None = None) -> None:
        keys = [] if what else self.keys
        where = ["--nodes", f"1:{len(self.hosts)}", "--gpus", "1"]
        where += ["--master-addr", self.hosts[0].address]
        self.call(host, "train", what or self.recipe, *keys, *where)

    def call(self, host: Host, *words: str) -> None:
        variables = python_path(self.folder)
        self.processes[host.name] = host.muster(*words, folder=self.folder, **variables)

    def start_all(self) -> None:
        for host in self.hosts:
            self.start(host)
        self.wait_for("world")

    @property
    def run(self) -> Run:
        return run_directory.find("latest", self.folder / "runs")

    def until(self, condition: Callable[[], object]) -> None:
        until(condition, LIMIT_S)

    def reached(self, steps: int) -> None:
        """Their lines are written, so this many are over."""
        self.until(lambda: self._there() and len(losses(self.run)) >= steps)

    def _there(self) -> bool:
        return (self.folder / "runs" / "latest").exists()

    def saved(self, step: int) -> None:
        self.until(lambda: self._there() and step in complete_steps(self.run.path))

    def events(self, *names: str) -> list[dict]:
        if not self._there():
            return []
        return [e for e in read_lines(self.run.path / EVENTS_FILE) if e["event"] in names]

    def wait_for(self, name: str, count: int = 1) -> None:
        self.until(lambda: len(self.events(name)) >= count)

    def lose(self, host: Host) -> None:
        """All of its processes end at once, as when its power fails."""
        command = ["ip", "netns", "pids", host.namespace]
        found = subprocess.run(command, capture_output=True, text=True)
        subprocess.run(["kill", "-9", *found.stdout.split()], check=False)  # some have ended
        self.processes.pop(host.name).wait()

    def waits(self) -> None:
        """Somebody is back, and waits for the next checkpoint."""
        self.until((self.run.path / REGROUP_FILE).exists)

    def finished(self) -> list[str]:
        self.allow(10**6)
        said = [p.communicate(timeout=LIMIT_S)[0] for p in self.processes.values()]
        assert [p.returncode for p in self.processes.values()] == [0] * len(said), said
        assert self.run.state() == "finished"
        return said


@pytest.fixture
def elastic(hosts, recipe, tmp_path) -> Elastic:  # noqa: F811
    return Elastic(hosts, recipe, tmp_path)


def assert_as_alone(run: Run, alone: list[dict[str, float]]) -> None:
    """Every step once, with the same samples; sums in another order are all that differs."""
    lines = read_lines(run.path / "metrics.jsonl")
    for name in ("step", "epoch", "samples"):
        assert [line[name] for line in lines] == [line[name] for line in alone]
    for name, rel in (("loss", 1e-5), ("grad_norm", 1e-4)):
        assert [line[name] for line in lines] == pytest.approx(
            [line[name] for line in alone], rel=rel
        )


def test_a_host_is_lost_and_taken_in_again_at_the_next_checkpoint(elastic, undisturbed):
    _, b = elastic.hosts
    elastic.allow(10)
    elastic.start_all()
    elastic.saved(4)
    elastic.lose(b)
    elastic.wait_for("world", 2)
    elastic.reached(9)
    elastic.start(b, "runs/latest")
    elastic.waits()
    said = elastic.finished()
    assert_as_alone(elastic.run, undisturbed(1)[:STEPS])
    (lost,) = elastic.events("node_lost")
    assert lost["host"] == "host-b"
    assert [e["hosts"] for e in elastic.events("node_joined")] == [["host-b"]]
    worlds = elastic.run.results()["worlds"]
    assert [world["ranks"] for world in worlds] == [2, 1, 2]
    assert worlds[0]["step"] == 0
    assert worlds[1]["step"] in (4, 8)
    assert worlds[2]["step"] == 12
    assert "host-b is lost at step" in said[0]
    assert "2 rank(s) instead of 1 on 2 of at most 2 node(s): host-a, host-b" in said[0]


@pytest.mark.guides
def test_a_link_that_comes_and_goes_costs_no_step(elastic, undisturbed):
    _, b = elastic.hosts
    elastic.start_all()
    for number in range(2):
        elastic.allow(EVERY * number + 2)
        elastic.reached(EVERY * number + 1)
        b.cut()
        elastic.wait_for("node_lost", number + 1)
        elastic.wait_for("world", 2 * number + 2)
        b.mend()
        elastic.waits()
        elastic.allow(EVERY * (number + 1) + 1)
        elastic.wait_for("world", 2 * number + 3)
    elastic.finished()
    assert [e["ranks"] for e in elastic.events("world")] == [2, 1, 2, 1, 2]
    assert_as_alone(elastic.run, undisturbed(1)[:STEPS])


@pytest.mark.guides
def test_a_host_that_is_lost_during_a_save_costs_that_checkpoint_alone(elastic, undisturbed):
    _, b = elastic.hosts
    elastic.allow(6)
    elastic.start_all()
    elastic.saved(4)
    (elastic.folder / "held").touch()
    elastic.allow(10**6)
    elastic.until((elastic.folder / "saving").exists)
    assert (elastic.run.path / "checkpoints" / "step-8").is_dir()
    elastic.lose(b)
    (elastic.folder / "held").unlink()
    elastic.finished()
    assert [world["ranks"] for world in elastic.run.results()["worlds"]] == [2, 1]
    assert elastic.run.results()["worlds"][1]["step"] == 4
    assert_as_alone(elastic.run, undisturbed(1)[:STEPS])


@pytest.mark.guides
def test_node_0_is_lost_and_comes_back(elastic, undisturbed):
    a, _ = elastic.hosts
    elastic.allow(6)
    elastic.start_all()
    elastic.saved(4)
    elastic.lose(a)
    elastic.start(a, "runs/latest")
    elastic.wait_for("world", 2)
    elastic.finished()
    assert elastic.events("world")[-1]["hosts"] == ["host-a", "host-b"]
    assert [e["step"] for e in elastic.events("resumed")] == [4]
    assert_as_alone(elastic.run, undisturbed(1)[:STEPS])


@pytest.mark.guides
def test_node_0_is_gone_for_good_and_the_printed_command_goes_on_without_it(elastic, undisturbed):
    """When its machine comes back and starts the run as before, it ends, and the run is left as it was."""
    a, b = elastic.hosts
    elastic.allow(6)
    elastic.start_all()
    elastic.saved(4)
    elastic.lose(a)
    log, mark = elastic.run.path / "launcher-host-b.log", "run on every node that is left: "
    elastic.until(lambda: mark in log.read_text())
    command = log.read_text().partition(mark)[2].splitlines()[0]
    elastic.lose(b)
    elastic.hurry(gather_s=1.0)
    elastic.call(b, *shlex.split(command)[1:])
    elastic.wait_for("world", 2)
    assert elastic.events("world")[-1]["hosts"] == ["host-b"]
    before = elastic.run.info()
    elastic.start(a, "runs/latest")
    said = elastic.processes.pop(a.name).communicate(timeout=LIMIT_S)[0]
    assert "is still running" in said
    assert elastic.run.info() == before
    elastic.finished()
    assert_as_alone(elastic.run, undisturbed(1)[:STEPS])


@pytest.mark.guides
def test_a_host_that_is_told_to_go_leaves_at_the_next_checkpoint_and_the_other_goes_on(
    elastic, undisturbed
):
    _, b = elastic.hosts
    elastic.allow(2)
    elastic.start_all()
    elastic.reached(1)
    gone = elastic.processes.pop(b.name)
    gone.send_signal(signal.SIGTERM)
    elastic.waits()
    elastic.allow(EVERY + 1)
    elastic.wait_for("world", 2)
    said = gone.communicate(timeout=LIMIT_S)[0]
    assert gone.returncode == run_directory.SIGNALLED, said
    assert "SIGTERM: this machine leaves the run" in said
    elastic.finished()
    worlds = elastic.run.results()["worlds"]
    assert [(world["ranks"], world["step"]) for world in worlds] == [(2, 0), (1, EVERY)]
    assert not elastic.events("node_lost")
    assert_as_alone(elastic.run, undisturbed(1)[:STEPS])


LOSSES = 20


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_twenty_losses_and_returns_on_three_hosts_change_no_step(
    ranks, recipe, tmp_path, record_property
):
    """At each loss one host, drawn, loses its power; every fifth is node 0. It returns at the next checkpoint."""
    steps = EVERY * (LOSSES + 2)
    keys = [
        "training.global_batch_size=12",
        f"training.steps={steps}",
        "distributed.max_restarts=3",
    ]
    drawn = random.Random(22)
    begun = time.monotonic()
    with network(3) as three:
        elastic = Elastic(three, recipe, tmp_path, *keys)
        elastic.start_all()
        for number in range(LOSSES):
            elastic.allow(EVERY * number + drawn.choice((1, 2, 3)))
            elastic.reached(EVERY * number + 1)
            victim = three[0] if number % 5 == 4 else drawn.choice(three[1:])
            worlds = len(elastic.events("world"))
            elastic.lose(victim)
            if victim is not three[0]:
                elastic.wait_for("world", worlds + 1)
            elastic.start(victim, "runs/latest")
            if victim is not three[0]:
                elastic.waits()
            elastic.allow(EVERY * (number + 1))
            elastic.until(lambda: elastic.events("world")[-1]["ranks"] == 3)
            elastic.saved(EVERY * (number + 1))
        elastic.finished()
        run, taken = elastic.run, time.monotonic() - begun
    alone = ranks(1)(run_training, str(tmp_path / "alone"), keys[:2], recipe)[0]
    assert_as_alone(run, alone)
    lines = read_lines(run.path / "metrics.jsonl")
    pairs = zip(lines, alone, strict=True)
    apart = max(abs(x["loss"] - y["loss"]) / abs(y["loss"]) for x, y in pairs)
    attempts = [e["ranks"] for e in elastic.events("world")]
    row = f"{LOSSES} losses, {len(attempts)} attempts {attempts}, {steps} steps in {taken:.0f} s, losses apart {apart:.1e}"
    record_property("row", row)
