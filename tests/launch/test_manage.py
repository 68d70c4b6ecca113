"""Looking after real runs: listing, watching, stopping, and going on with less memory."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import processes
from muster import run_directory
from muster.observe.results import read_lines
from muster.run_directory import Run
from processes import lives, press_ctrl_c, python_path, runs_module, until
from tiny import LONG, losses
from training import run_training

PLANT = """
import os, resource, sys
if "muster.worker" in sys.orig_argv and os.environ.get("RANK") == "1":
    import psutil, torch
    from muster.tasks.causal_lm import CausalLM
    right, calls, EACH = CausalLM.loss, [], 2**29

    def loss(self, output, batch):
        calls.append(len(batch.ids))
        if len(calls) == 1:
            limit = psutil.Process().memory_info().vms + int(5.5 * EACH)
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        if len(calls) >= int(os.environ["HUNGRY_FROM"]):
            torch.empty(len(batch.ids) * EACH, dtype=torch.uint8)
        return right(self, output, batch)

    CausalLM.loss = loss
"""


def muster(
    *arguments: str, folder: Path, code: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    return processes.muster(*arguments, folder=folder, code=code, env=variables)


def start(recipe: str, folder: Path) -> Run:
    muster("train", recipe, LONG, "--gpus", "2", "--detach", folder=folder)
    run = run_directory.find("latest", folder / "runs")
    until(lambda: run.last_metrics().get("step", 0) >= 2 or run.state() not in run_directory.ALIVE)
    assert run.state() == "running", run.info()
    return run


@pytest.fixture(scope="module")
def going(recipe, tmp_path_factory) -> Iterator[Run]:
    run = start(recipe, tmp_path_factory.mktemp("going"))
    yield run
    for process in run.processes():
        process.kill()


def test_runs_lists_state_age_ranks_step_and_loss(going):
    folder = going.path.parent.parent
    (line,) = [li for li in muster("runs", folder=folder).stdout.splitlines() if going.name in li]
    _, name, state, age, ranks, step, loss, best, _ = (cell.strip() for cell in line.split("│"))
    assert (name, state, ranks) == (going.name, "running", "2")
    assert age.endswith((" s", " min"))
    assert int(step) >= 2
    assert float(loss) > 0
    assert best == ""


def test_watching_shows_every_rank_and_leaves_the_run_alone(going):
    watcher = processes.start(
        [*processes.MUSTER, "watch", going.name],
        going.path.parent.parent,
        env={"PYTHONUNBUFFERED": "1"},
    )
    seen = ""
    host = os.uname().nodename
    while not all(f"rank {rank}  host {host}  step" in seen for rank in (0, 1)):
        line = watcher.stdout.readline()
        assert line, seen
        seen += line
    seen += press_ctrl_c(watcher)
    assert watcher.returncode == 130
    assert "[Rank 0] Distributed Training Initialized" in seen
    assert "compute ms" in seen
    assert going.state() == "running"


def test_stopping_saves_and_says_how_to_go_on(going):
    """The last that happens to this run."""
    folder = going.path.parent.parent
    said = muster("stop", going.name, folder=folder).stdout
    done = going.last_metrics()["step"]
    assert f"{going.name} stopped; saved up to step {done}\n" in said
    assert f"train runs/{going.name}" in said
    again = muster("stop", going.name, folder=folder, code=2)
    assert f"{going.name} is not running: it is stopped; go on:" in again.stderr


@pytest.mark.guides
def test_a_run_that_does_not_answer_is_killed_with_all_its_ranks(recipe, tmp_path):
    run = start(recipe, tmp_path)
    everyone = run.processes()
    ranks = [p for p in everyone if runs_module(p, "muster.worker")]
    assert len(ranks) == 2
    for process in (ranks[1], everyone[0]):
        process.suspend()
    said = muster("stop", "latest", "--wait", "1", folder=tmp_path).stdout
    assert "stopped, its processes killed: they answered neither a request nor SIGTERM" in said
    assert run.state() == "stopped"
    until(lambda: not any(lives(process.pid) for process in everyone))


def made(folder: Path, **info: object) -> Run:
    run = run_directory.create(folder / "runs", "speech", {})
    run.update(**info)
    return run


def test_what_cannot_be_stopped_is_said_in_words(tmp_path):
    run = made(tmp_path, state="finished")
    said = muster("stop", run.name[:-1], folder=tmp_path, code=2).stderr
    assert f"did you mean {run.name}?" in said
    assert "it is finished\n" in muster("stop", run.name, folder=tmp_path, code=2).stderr
    run.update(state="running", host="elsewhere", owned=time.time())
    said = muster("stop", run.name, "--wait", "0.1", folder=tmp_path, code=2).stderr
    assert "processes are on elsewhere" in said
    run.update(state="queued")
    said = muster("stop", run.name, folder=tmp_path, code=2).stderr
    assert "waits at a scheduler" in said


def test_a_folder_without_runs_and_a_step_without_a_loss_are_no_stack_trace(tmp_path):
    assert "no runs in runs; start one" in muster("runs", folder=tmp_path).stdout
    run = made(tmp_path, state="failed")
    (run.path / "metrics.jsonl").write_text('{"step": 3, "loss": null}\n')
    assert "not finite" in muster("runs", folder=tmp_path).stdout


SHORT = ["training.steps=4", "training.global_batch_size=16", "checkpoint.every_steps=2"]
SHORT += ["training.on_oom=shrink", "checkpoint.asynchronous=false"]


@pytest.fixture(scope="module")
def smaller(ranks, recipe, tmp_path_factory) -> dict[int, list[float]]:
    """Losses of runs that take four samples at a time from the start, by world size."""
    overrides = [*SHORT, "training.per_device_batch_size=4"]
    folders = {world: str(tmp_path_factory.mktemp(f"fresh{world}")) for world in (1, 2)}
    found = {w: ranks(w)(run_training, folders[w], overrides, recipe)[0] for w in folders}
    return {world: [line["loss"] for line in lines] for world, lines in found.items()}


@pytest.mark.guides
@pytest.mark.parametrize(("calls", "saved"), [pytest.param(1, 0, marks=pytest.mark.full), (4, 2)])
def test_ranks_start_again_smaller_when_one_of_them_has_no_room(
    smaller, recipe, tmp_path, calls, saved
):
    """Rank 1 alone may not hold more than five samples: in the trial before the first step, or, as
    the plant gets hungry with its fourth micro-batch, in step 3, just after a checkpoint."""
    (tmp_path / "sitecustomize.py").write_text(PLANT)
    variables = {"HUNGRY_FROM": str(calls), **python_path(tmp_path)}
    words = [*SHORT, "training.per_device_batch_size=8", "--gpus", "2"]
    said = muster("train", recipe, *words, folder=tmp_path, **variables).stdout
    run = run_directory.find("latest", tmp_path / "runs")
    when = f"step {saved + 1}" if saved else r"step \d \(tried ahead\)"
    words = f"out of memory at {when} on rank 1: 8 → 4 samples at a time; all ranks restart"
    assert re.search(words, said)
    events = read_lines(run.path / "events.jsonl")
    assert [e["step"] for e in events if e["event"] == "started"] == [0, saved]
    assert run.info()["restarts"] == 0, "not counted among those of killed ranks"
    assert run.results()["planned"]["gradient_accumulation_steps"] == 2
    assert len(run.results()["shrunk"]) == 1
    assert losses(run) == pytest.approx(smaller[1], rel=1e-5)
    assert losses(run) == (pytest.approx(smaller[2], rel=1e-5) if saved else smaller[2])
