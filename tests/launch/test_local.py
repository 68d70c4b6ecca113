"""Real runs, started as a user starts them, and killed as a machine kills them."""

from __future__ import annotations

import random
import time
from pathlib import Path

import psutil
import pytest

import processes
from muster import run_directory
from muster.observe.results import STOP_FILE
from muster.run_directory import Run
from processes import MUSTER, lives, muster, press_ctrl_c, python_path, runs_module, until
from tiny import LONG, held_after, losses

STEPS = 24


@pytest.fixture
def start(recipe, tmp_path):
    """`start(folder, steps, go)` begins a run of 24 steps on two ranks, in a folder of its own; after
    `steps` it waits until there is a file `go`."""

    def begin(folder: Path, steps: int, go: Path) -> Run:
        words = [f"training.steps={STEPS}", "distributed.max_restarts=20"]
        words += ["checkpoint.every_steps=3", "--gpus", "2", "--detach"]
        muster("train", recipe, *words, folder=folder, env=held_after(steps, folder, go))
        return run_directory.find("latest", folder / "runs")

    return begin


def ended(run: Run) -> bool:
    return run.state() not in ("starting", "running")


def workers(run: Run) -> list[psutil.Process]:
    try:
        children = psutil.Process(run.info()["pid"]).children()
        return [p for p in children if runs_module(p, "muster.worker")]
    except psutil.Error:
        return []


def saving(run: Run) -> bool:
    folders = (run.path / "checkpoints").glob("step-*")
    return any(not (f / "manifest.json").exists() for f in folders)


@pytest.fixture(scope="module")
def finished(recipe, undisturbed, tmp_path_factory) -> Run:
    """A run that a user started and nobody disturbed: the losses of the same ranks in a pool."""
    folder = tmp_path_factory.mktemp("finished")
    muster("train", recipe, "--gpus", "2", folder=folder)
    run = run_directory.find("latest", folder / "runs")
    assert run.state() == "finished"
    assert losses(run) == expected(undisturbed, len(losses(run)))
    return run


def expected(undisturbed, steps: int = STEPS) -> list[float]:
    return [line["loss"] for line in undisturbed(2)[:steps]]


def storm(run: Run, kills: int, seed: int, go: Path) -> int:
    """Kill a random rank at random moments, every other time in the middle of a save: for that the run may
    have to `go` on to its end."""
    rng, done = random.Random(seed), 0
    while done < kills and not ended(run):
        restarts = run.info().get("restarts", 0)
        until(lambda: ended(run) or workers(run))
        if done % 2:
            go.touch()
            until(lambda: ended(run) or saving(run))
        else:
            time.sleep(rng.uniform(0.0, 2.0))
        victims = workers(run)
        if not victims or ended(run):
            continue
        rng.choice(victims).kill()
        done += 1
        until(lambda before=restarts: ended(run) or run.info().get("restarts", 0) > before)
    go.touch()
    until(lambda: ended(run))
    return done


@pytest.mark.parametrize(
    ("kills", "seed"),
    [(1, 1), pytest.param(20, 2, marks=[pytest.mark.full, pytest.mark.timeout(900)])],
)
def test_ranks_killed_at_random_moments_end_at_the_same_loss(
    undisturbed, start, tmp_path, kills, seed
):
    done = 0
    for attempt in range(kills):  # a storm may arrive after the run has ended; start another
        folder = tmp_path / str(attempt)
        folder.mkdir()
        run = start(folder, STEPS - 1, folder / "go")
        done += storm(run, kills - done, seed + attempt, folder / "go")
        assert run.state() == "finished", run.info()
        assert losses(run) == expected(undisturbed)
        if done >= kills:
            break
    print(f"{done} kills over {attempt + 1} run(s), every loss as undisturbed")
    assert done == kills


HELD_UP = """
import os, sys, time
if "muster.worker" in sys.orig_argv:
    supervisor = os.getppid()
    open(f"{os.environ['HELD_UP']}/{os.getpid()}", "w")
    while os.getppid() == supervisor:
        time.sleep(0.02)
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_ranks_whose_supervisor_is_killed_while_they_start_end_too(recipe, tmp_path, ranks):
    """Before they have imported anything, and so before they could ask the kernel for it."""
    (tmp_path / "sitecustomize.py").write_text(HELD_UP)
    (tmp_path / "starting").mkdir()
    env = {"HELD_UP": str(tmp_path / "starting"), **python_path(tmp_path)}
    words = [recipe, LONG, "--gpus", str(ranks), "--detach"]
    muster("train", *words, folder=tmp_path, env=env)
    run = run_directory.find("latest", tmp_path / "runs")
    until(lambda: len(list((tmp_path / "starting").iterdir())) == ranks)
    psutil.Process(run.info()["pid"]).kill()
    started = [int(path.name) for path in (tmp_path / "starting").iterdir()]
    until(lambda: not any(map(lives, started)))
    assert losses(run) == []


def test_of_two_starts_at_once_one_is_refused_by_name(undisturbed, start, tmp_path):
    """The first to come does not end before the second comes."""
    go = tmp_path / "go"
    run = start(tmp_path, STEPS - 1, go)
    until(lambda: len(losses(run)) > 2)
    ranks = workers(run)
    assert len(ranks) == 2
    psutil.Process(run.info()["pid"]).kill()
    until(lambda: not any(lives(rank.pid) for rank in ranks))
    words = [*MUSTER, "train", "runs/latest", "--gpus", "2", "--detach"]
    both = [processes.start(words, tmp_path, env=python_path(tmp_path)) for _ in range(2)]
    said = [process.communicate(timeout=100)[0] for process in both]
    go.touch()
    assert sorted(process.returncode for process in both) == [0, 2], said
    refused = said[[process.returncode for process in both].index(2)]
    assert f"{run.name} is" in refused
    until(lambda: ended(run))
    assert run.state() == "finished"
    assert losses(run) == expected(undisturbed)


@pytest.mark.both
def test_a_stopped_run_saves_at_the_next_step_and_goes_on_on_fewer_ranks(
    undisturbed, start, tmp_path
):
    run = start(tmp_path, STEPS - 4, tmp_path / "runs" / "latest" / STOP_FILE)
    until(lambda: len(losses(run)) > 4)
    said = muster("stop", "latest", folder=tmp_path)
    assert "stopped" in said.stdout
    stopped_at = len(losses(run))
    assert (run.path / "checkpoints" / f"step-{stopped_at}" / "manifest.json").exists()
    said = muster("train", "runs/latest", "--gpus", "1", folder=tmp_path).stdout
    assert f"/step-{stopped_at}, with 1 rank(s) instead of 2" in said
    assert "steps 0 to" not in said, "lines of the first start"
    assert run.state() == "finished"
    assert losses(run) == pytest.approx(expected(undisturbed), rel=1e-5)


def test_a_failure_names_the_cause_and_the_exit_code_is_not_zero(tmp_path):
    words = ["data.tokenizer.characters=abc", "data.max_parquet_files=1"]
    done = muster("train", "speech", *words, folder=tmp_path, code=1)
    assert "the run failed" in done.stdout
    assert "outside the vocabulary" in done.stdout
    assert "ranks/0.log" in done.stdout
    assert run_directory.find("latest", tmp_path / "runs").state() == "failed"


def test_leaving_with_ctrl_c_leaves_the_run_running(recipe, tmp_path):
    watcher = processes.start([*processes.MUSTER, "train", recipe, LONG], tmp_path)
    until(lambda: (tmp_path / "runs" / "latest" / "metrics.jsonl").exists())
    words = press_ctrl_c(watcher)
    assert watcher.returncode == 130
    assert "goes on" in words
    run = run_directory.find("latest", tmp_path / "runs")
    before = len(losses(run))
    until(lambda: len(losses(run)) > before)
    muster("stop", "latest", folder=tmp_path)


def test_each_rank_has_a_log_with_its_prefix(finished):
    for rank in range(2):
        words = (finished.path / "ranks" / f"{rank}.log").read_text()
        assert f"[Rank {rank}] Distributed Training Initialized: Rank: {rank}/2" in words


def test_a_run_refuses_another_recipe_and_keeps_its_own(finished):
    before = (finished.path / "recipe.yaml").read_text()
    folder = finished.path.parent.parent
    done = muster("train", "runs/latest", "seed=7", "--gpus", "2", folder=folder, code=2)
    assert "seed=42" in done.stderr
    assert (finished.path / "recipe.yaml").read_text() == before
