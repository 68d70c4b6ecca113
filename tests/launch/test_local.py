"""Real runs, started as a user starts them, and killed as a machine kills them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from muster import runs
from muster.observe.results import read_lines
from muster.runs import Run

STEPS = 30
SMALL = [
    f"training.steps={STEPS}",
    "training.global_batch_size=8",
    "checkpoint.every_steps=3",
    "data.max_parquet_files=1",
    "evaluation.every_steps=null",
    "evaluation.final=false",
    "logging.tensorboard=false",
    "distributed.max_restarts=20",
]


def muster(*arguments: str, folder: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "muster", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def start(folder: Path, *overrides: str, gpus: int = 2) -> Run:
    muster("train", "speech", *SMALL, *overrides, "--gpus", str(gpus), "--detach", folder=folder)
    return runs.find("latest", folder / "runs")


def until(condition: Callable[[], object], limit: float = 90.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)


def ended(run: Run) -> bool:
    return run.state() not in ("starting", "running")


def workers(run: Run) -> list[psutil.Process]:
    try:
        children = psutil.Process(run.info()["pid"]).children()
        return [p for p in children if "muster.worker" in p.cmdline()]
    except psutil.Error:
        return []


def losses(run: Run) -> list[float]:
    return [line["loss"] for line in read_lines(run.path / "metrics.jsonl")]


def saving(run: Run) -> bool:
    folders = (run.path / "checkpoints").glob("step-*")
    return any(not (f / "manifest.json").exists() for f in folders)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Run:
    run = start(tmp_path_factory.mktemp("calm"))
    until(lambda: ended(run))
    assert run.state() == "finished"
    return run


def storm(run: Run, kills: int, seed: int) -> int:
    """Kill a random rank at random moments, every other time in the middle of a save."""
    rng, done = random.Random(seed), 0
    while done < kills and not ended(run):
        restarts = run.info().get("restarts", 0)
        until(lambda: ended(run) or workers(run))
        if done % 2:
            until(lambda: ended(run) or saving(run))
        else:
            time.sleep(rng.uniform(0.0, 7.0))
        victims = workers(run)
        if not victims or ended(run):
            continue
        rng.choice(victims).kill()
        done += 1
        until(lambda before=restarts: ended(run) or run.info().get("restarts", 0) > before)
    until(lambda: ended(run))
    return done


@pytest.mark.parametrize(
    ("kills", "seed"),
    [(4, 1), pytest.param(20, 2, marks=[pytest.mark.full, pytest.mark.timeout(900)])],
)
def test_ranks_killed_at_random_moments_end_at_the_same_loss(undisturbed, tmp_path, kills, seed):
    done = 0
    for attempt in range(kills):  # a storm may arrive after the run has ended; start another
        run = start(_fresh(tmp_path, attempt))
        done += storm(run, kills - done, seed + attempt)
        assert run.state() == "finished", run.info()
        assert losses(run) == losses(undisturbed)
        if done >= kills:
            break
    print(f"{done} kills over {attempt + 1} run(s), every loss as undisturbed")
    assert done == kills


def _fresh(tmp_path: Path, attempt: int) -> Path:
    folder = tmp_path / str(attempt)
    folder.mkdir()
    return folder


def test_a_killed_launcher_takes_its_ranks_along_and_the_run_can_be_continued(
    undisturbed, tmp_path
):
    run = start(tmp_path)
    until(lambda: len(losses(run)) > 8)
    ranks = workers(run)
    psutil.Process(run.info()["pid"]).kill()
    psutil.wait_procs(ranks, timeout=10)
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks)
    assert run.state() == "interrupted"
    shown = muster("train", "runs/latest", "--gpus", "2", folder=tmp_path)
    assert "resumed at step" in shown.stdout
    assert losses(run) == losses(undisturbed)


def test_a_stopped_run_saves_at_the_next_step_and_goes_on_on_fewer_ranks(undisturbed, tmp_path):
    run = start(tmp_path)
    until(lambda: len(losses(run)) > 4)
    said = muster("stop", "latest", folder=tmp_path)
    assert "stopped" in said.stdout
    stopped_at = len(losses(run))
    assert (run.path / "checkpoints" / f"step-{stopped_at}" / "manifest.json").exists()
    muster("train", "runs/latest", "--gpus", "1", folder=tmp_path)
    assert run.state() == "finished"
    assert losses(run) == pytest.approx(losses(undisturbed), rel=1e-5)


def test_a_failure_names_the_cause_and_the_exit_code_is_not_zero(tmp_path):
    done = muster(
        "train", "speech", *SMALL, "data.tokenizer.characters=abc", folder=tmp_path, check=False
    )
    assert done.returncode == 1
    assert "the run failed" in done.stdout
    assert "outside the vocabulary" in done.stdout
    assert "ranks/0.log" in done.stdout
    assert runs.find("latest", tmp_path / "runs").state() == "failed"


def press_ctrl_c(watcher: subprocess.Popen) -> str:
    """Until it is heard: an interrupt that arrives while a callback runs can be lost."""
    for _ in range(4):
        watcher.send_signal(signal.SIGINT)
        try:
            return watcher.communicate(timeout=15)[0]
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("the watcher did not leave")


def test_leaving_with_ctrl_c_leaves_the_run_running(tmp_path):
    watcher = subprocess.Popen(
        [sys.executable, "-m", "muster", "train", "speech", *SMALL, "training.steps=500"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    until(lambda: (tmp_path / "runs" / "latest" / "metrics.jsonl").exists())
    words = press_ctrl_c(watcher)
    assert watcher.returncode == 130
    assert "goes on" in words
    run = runs.find("latest", tmp_path / "runs")
    before = len(losses(run))
    until(lambda: len(losses(run)) > before)
    muster("stop", "latest", folder=tmp_path)


def test_each_rank_has_a_log_with_its_prefix(undisturbed):
    for rank in range(2):
        words = (undisturbed.path / "ranks" / f"{rank}.log").read_text()
        assert f"[Rank {rank}] Distributed Training Initialized: Rank: {rank}/2" in words


def test_a_run_refuses_another_recipe_and_keeps_its_own(undisturbed):
    before = (undisturbed.path / "recipe.yaml").read_text()
    folder = undisturbed.path.parent.parent
    done = muster("train", "runs/latest", "seed=7", "--gpus", "2", folder=folder, check=False)
    assert done.returncode == 2
    assert "seed=42" in done.stderr
    assert (undisturbed.path / "recipe.yaml").read_text() == before


def test_eval_scores_a_checkpoint_with_either_decoder(undisturbed):
    folder = undisturbed.path.parent.parent
    for decoder in ("greedy", "beam"):
        done = muster(
            "eval", "runs/latest", "--decoder", decoder, "--split", "validation", folder=folder
        )
        assert "validation: WER" in done.stdout
    refused = muster(
        "eval", "runs/latest", "--decoder", "greedy", "--ngram", "x", folder=folder, check=False
    )
    assert "--ngram needs" in refused.stderr
