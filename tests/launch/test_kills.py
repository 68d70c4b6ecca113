"""A run whose rank, or whose supervisor, is killed in any phase goes on to the same losses."""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import suppress

import psutil
import pytest

from muster import run_directory
from muster.observe.results import read_lines
from muster.run_directory import ALIVE, Run
from processes import lives, muster, python_path, runs_module, until
from tiny import LONG, losses
from training import run_training

STEPS = 6
PHASES = ("import", "join", "first step", "first save", "manifest", "prune", "last save")
# Runs in every process before its program. The first rank to come to the phase stays there.
HOLD = """
import os, sys, time
PHASE, MARK = os.environ["HOLD_PHASE"], os.environ["HOLD_MARK"]

def hold():
    try:
        os.write(os.open(MARK, os.O_WRONLY | os.O_CREAT | os.O_EXCL), str(os.getpid()).encode())
    except FileExistsError:
        return  # ranks that were started again
    time.sleep(600)

def half_removed(path, *_):
    return os.path.isdir(path) and not os.path.exists(f"{path}/manifest.json")

def hold_before(owner, name, when=lambda *arguments: True):
    real = getattr(owner, name)
    def held(*arguments, **options):
        if when(*arguments):
            hold()
        return real(*arguments, **options)
    setattr(owner, name, held)

if "muster.worker" in sys.orig_argv:
    if PHASE == "import":
        hold()
    else:
        import shutil
        import torch
        from muster.launch import rendezvous
        from muster.training import checkpoint
    if PHASE == "join":
        hold_before(rendezvous, "register")
    elif PHASE == "first step":
        hold_before(torch.optim.AdamW, "step")
    elif PHASE == "first save":
        hold_before(checkpoint, "file_entry")
    elif PHASE == "manifest":
        hold_before(os, "replace", lambda old, new: str(new).endswith("manifest.json"))
    elif PHASE == "prune":
        hold_before(shutil, "rmtree", half_removed)
    elif PHASE == "last save":
        hold_before(
            checkpoint.Checkpoints, "_write_manifest", lambda *given: given[3]["step"] == LAST
        )
"""


@pytest.fixture
def held(recipe, tmp_path):
    """A run on two ranks of which one, whose process comes with it, is held in a phase."""

    def begin(phase: str) -> tuple[Run, psutil.Process]:
        (tmp_path / "sitecustomize.py").write_text(HOLD.replace("LAST", str(STEPS)))
        mark = tmp_path / "held"
        env = {"HOLD_PHASE": phase, "HOLD_MARK": str(mark), **python_path(tmp_path)}
        words = [f"training.steps={STEPS}", "checkpoint.every_steps=2", "checkpoint.keep=1"]
        muster("train", recipe, *words, "--gpus", "2", "--detach", folder=tmp_path, env=env)
        until(lambda: mark.exists() and mark.read_text())
        return run_directory.find("latest", tmp_path / "runs"), psutil.Process(
            int(mark.read_text())
        )

    return begin


def ranks_of(run: Run) -> list[psutil.Process]:
    return [p for p in psutil.process_iter() if runs_module(p, f"muster.worker {run.path}")]


def check(run: Run, undisturbed) -> None:
    """It finished as if nobody had killed anything, and left nothing behind."""
    assert run.state() == "finished", run.info()
    until(lambda: not lives(run.info()["pid"]))  # the supervisor ends after its ranks
    assert losses(run) == [line["loss"] for line in undisturbed(2)[:STEPS]]
    (checkpoint,) = (run.path / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{STEPS}"
    assert not list(checkpoint.glob(".manifest*"))
    assert not ranks_of(run)
    assert not list(run.path.rglob(".torchelastic*"))


ORDINARY = {("both", "manifest")}
cases = pytest.mark.parametrize(
    ("killed", "phase"),
    [
        pytest.param(who, phase, marks=() if (who, phase) in ORDINARY else pytest.mark.full)
        for who in ("rank", "both")
        for phase in PHASES
    ],
)


@cases
def test_a_kill_in_any_phase_changes_nothing(held, undisturbed, tmp_path, killed, phase):
    run, rank = held(phase)
    if killed == "rank":
        rank.kill()
        until(lambda: run.state() not in ("starting", "running"))
    else:
        supervisor = psutil.Process(run.info()["pid"])
        ranks = supervisor.children()
        supervisor.kill()
        rank.kill()
        until(lambda: not any(lives(p.pid) for p in (supervisor, *ranks)))
        assert len(ranks) == 2
        assert run.state() == "interrupted"
        muster("train", "runs/latest", "--gpus", "2", folder=tmp_path)
    check(run, undisturbed)
    if phase not in ("import", "join"):
        (again,) = run.results()["restarts"]
        assert again["kind"] == ("restarted" if killed == "rank" else "resumed")
        assert ("SIGKILL" if killed == "rank" else "processes were gone") in again["why"]


KILLS = 100


def kill_one(run: Run, drawn: random.Random) -> str | None:
    """A rank, the supervisor or all at once; None where such a process is not there yet."""
    who = drawn.choice(("rank", "supervisor", "all"))
    everyone, ranks = run.processes(), ranks_of(run)
    victims = {"rank": drawn.sample(ranks, min(1, len(ranks))), "supervisor": everyone[:1]}
    chosen = victims.get(who, everyone)
    for process in chosen:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return who if chosen else None


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_hundred_kills_at_moments_that_are_drawn_change_no_step(
    ranks, recipe, tmp_path, record_property
):
    """While ranks start, train or save; whenever the run has ended, it is resumed."""
    keys = ["checkpoint.every_steps=3", "checkpoint.keep=2", "distributed.max_restarts=2"]
    words = ["train", recipe, LONG, *keys, "--gpus", "2", "--detach", "--run", "storm"]
    drawn, kills, resumes = random.Random(100), Counter[str](), 0
    muster(*words, folder=tmp_path)
    run = run_directory.find("storm", tmp_path / "runs")
    while kills.total() < KILLS:
        if drawn.random() < 0.5:
            time.sleep(drawn.uniform(0, 3))  # mostly while ranks start
        else:
            goal = len(losses(run)) + drawn.randint(1, 9)
            until(lambda goal=goal: run.state() not in ALIVE or len(losses(run)) >= goal, 240)
        if run.state() not in ALIVE:
            until(lambda: not ranks_of(run))  # they notice that their supervisor is gone
            muster("train", "runs/storm", "--gpus", "2", "--detach", folder=tmp_path)
            resumes += 1
        elif who := kill_one(run, drawn):
            kills[who] += 1
    if run.state() not in ALIVE:
        until(lambda: not ranks_of(run))
        muster("train", "runs/storm", "--gpus", "2", "--detach", folder=tmp_path)
    seen = len(losses(run))
    until(lambda: len(losses(run)) > seen)
    muster("stop", "runs/storm", folder=tmp_path)
    lines = read_lines(run.path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    whole = [f"training.steps={len(lines)}"]
    alone = ranks(2)(run_training, str(tmp_path / "alone"), whole, recipe)[0]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in lines] == [line[name] for line in alone]
    restarts = len(run.results()["restarts"])
    told = ", ".join(f"{n} × {who}" for who, n in kills.most_common())
    row = f"killed {told}; {resumes} resumes, {restarts} restarts, {len(lines)} steps, each the same number"
    record_property("row", row)
    assert len(lines) > KILLS
