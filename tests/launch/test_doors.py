"""The same recipe through every door: whoever starts the ranks, the losses are the same."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from muster import run_directory
from muster.cli import app
from muster.errors import LaunchError, RecipeError
from muster.observe.results import STOP_FILE
from muster.recipe.load import from_resolved
from muster.run_directory import Run
from processes import MUSTER, free_port, runs_module, start, until
from tiny import LONG, STEPS, held_after, losses

TORCHRUN = ["torchrun", "--standalone", "--nproc_per_node=2"]
DEEPSPEED = str(Path(sys.executable).with_name("deepspeed"))
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", *MUSTER]


def the_run(folder: Path) -> Run:
    return run_directory.find("latest", folder / "runs")


def said_of(folder: Path) -> list[float]:
    return losses(folder / "runs" / "latest")


def as_alone(undisturbed) -> object:
    return pytest.approx([line["loss"] for line in undisturbed(1)[:STEPS]], rel=1e-5)


@pytest.mark.parametrize(
    ("command", "env"),
    [
        pytest.param([*TORCHRUN, *MUSTER[1:]], {}, marks=pytest.mark.guides, id="torchrun"),
        pytest.param(
            MPIRUN,
            {},
            marks=[
                pytest.mark.guides,
                pytest.mark.skipif(not shutil.which("mpirun"), reason="Open MPI is not installed"),
            ],
            id="mpirun",
        ),
        pytest.param(
            [DEEPSPEED, "--num_gpus=2", f"--master_port={free_port()}", "--module", "muster"],
            {"DS_ACCELERATOR": "cpu"},
            marks=[
                pytest.mark.guides,
                pytest.mark.skipif(
                    not Path(DEEPSPEED).exists(), reason="DeepSpeed is not installed"
                ),
            ],
            id="deepspeed",
        ),
    ],
)
def test_ranks_that_someone_else_started_train_alike(undisturbed, recipe, tmp_path, command, env):
    """New interpreters, as each launcher starts them. torchrun's folder for its ranks is not left behind."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    if "torchrun" in command:
        env = {**env, "TMPDIR": str(temporary)}
    process = start([*command, "train", recipe], tmp_path, real=True, env=env)
    said = process.communicate(timeout=200)[0]
    assert process.returncode == 0, said
    assert the_run(tmp_path).state() == "finished"
    assert the_run(tmp_path).info()["ranks"] == 2
    assert said_of(tmp_path) == as_alone(undisturbed)
    assert list(temporary.iterdir()) == []


@pytest.mark.guides
def test_ranks_in_new_interpreters_train_alike(undisturbed, recipe, tmp_path):
    """In the ordinary tests, ranks are forked from a process with all imports done."""
    process = start([*MUSTER, "train", recipe, "--gpus", "2"], tmp_path, real=True)
    said = process.communicate(timeout=200)[0]
    assert process.returncode == 0, said
    assert said_of(tmp_path) == as_alone(undisturbed)


@pytest.mark.guides
def test_ranks_that_torchrun_starts_again_go_on_in_their_run(undisturbed, recipe, tmp_path):
    command = [*TORCHRUN, "--max-restarts=2", *MUSTER[1:], "train", recipe]
    go = tmp_path / "go"
    process = start([*command, "training.steps=18"], tmp_path, env=held_after(17, tmp_path, go))
    saved = tmp_path / "runs" / "latest" / "checkpoints" / "step-12" / "manifest.json"
    until(lambda: saved.exists() or process.poll() is not None)
    psutil.Process(process.pid).children()[1].kill()
    go.touch()
    said = process.communicate(timeout=200)[0]
    assert process.returncode == 0, said
    assert len(run_directory.every(tmp_path / "runs")) == 1
    assert "resumed at step 12" in said
    alone = [line["loss"] for line in undisturbed(1)[:18]]
    assert said_of(tmp_path) == pytest.approx(alone, rel=1e-5)


@pytest.mark.guides
def test_a_named_run_goes_on_under_torchrun(undisturbed, recipe, tmp_path):
    command = [*TORCHRUN, "-m", "--", "muster"]  # else torchrun takes --run for its own --run-path
    for words in ([recipe, "--run", "mine", "training.steps=4"], ["runs/mine", "training.steps=8"]):
        process = start([*command, "train", *words], tmp_path)
        said = process.communicate(timeout=200)[0]
        assert process.returncode == 0, said
        (tmp_path / "runs" / "mine" / STOP_FILE).write_text("")  # as if it had been stopped
    assert "resumed at step 4" in said
    assert [run.name for run in run_directory.every(tmp_path / "runs")] == ["mine"]
    alone = [line["loss"] for line in undisturbed(1)[:8]]
    assert said_of(tmp_path) == pytest.approx(alone, rel=1e-5)


@pytest.mark.guides
def test_a_batch_made_of_two_numbers_stays_on_other_ranks(undisturbed, recipe, tmp_path):
    """2 × 4 × one rank is the tiny recipe's 8; two ranks would make 16 of the same words."""
    words = [recipe, "--run", "mine", "~training.global_batch_size"]
    words += ["training.per_device_batch_size=2", "training.gradient_accumulation_steps=4"]
    two = [*TORCHRUN, "-m", "--", "muster"]
    for command, steps in ((MUSTER, 4), (two, 8)):
        process = start([*command, "train", *words, f"training.steps={steps}"], tmp_path)
        said = process.communicate(timeout=200)[0]
        assert process.returncode == 0, said
        run = Run(tmp_path / "runs" / "mine")
        kept = from_resolved(run.path / "recipe.yaml").training
        assert (kept.global_batch_size, kept.scale_with_ranks) == (8, "none")
        assert "= 8 samples per optimizer step" in said
        (run.path / STOP_FILE).write_text("")  # as if it had been stopped
    assert "resumed at step 4" in said
    assert "with 2 rank(s) instead of 1" in said
    assert "steps 0 to 4" not in said, "lines of the first start"
    planned = run.results()["planned"]
    assert (planned["global_batch_size"], planned["gradient_accumulation_steps"]) == (8, 2)
    alone = [line["loss"] for line in undisturbed(1)[:8]]
    assert said_of(tmp_path) == pytest.approx(alone, rel=1e-5)
    again = ["train", str(run.path), "training.scale_with_ranks=batch"]
    with pytest.raises(RecipeError, match="mine keeps the global batch"):
        CliRunner().invoke(app, again, catch_exceptions=False)


@pytest.mark.parametrize(
    ("number", "to"),
    [
        pytest.param(signal.SIGTERM, "supervisor", marks=pytest.mark.guides),
        pytest.param(signal.SIGUSR1, "rank 1", marks=pytest.mark.full),
    ],
)
def test_a_signal_asks_for_a_checkpoint_at_the_next_step(recipe, tmp_path, number, to):
    process = start([*MUSTER, "train", recipe, LONG, "--gpus", "2"], tmp_path)
    until(lambda: len(said_of(tmp_path)) > 2 or process.poll() is not None)
    supervisor = psutil.Process(the_run(tmp_path).info()["pid"])
    workers = [p for p in supervisor.children() if runs_module(p, "muster.worker")]
    (supervisor if to == "supervisor" else workers[1]).send_signal(number)
    said = process.communicate(timeout=200)[0]
    assert the_run(tmp_path).state() == "stopped", said
    assert process.returncode == (143 if to == "supervisor" else 0)
    done = len(said_of(tmp_path))
    manifest = the_run(tmp_path).path / "checkpoints" / f"step-{done}" / "manifest.json"
    assert manifest.exists()


@pytest.mark.parametrize("flag", ["--gpus=2", "--nodes=2", "--detach"])
def test_what_a_rank_cannot_heed_is_refused_by_name(monkeypatch, recipe, flag):
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=f"leave {flag.partition('=')[0]} out"):
        CliRunner().invoke(app, ["train", recipe, flag], catch_exceptions=False)


def test_a_process_that_is_a_rank_already_starts_no_others(recipe, tmp_path):
    process = start([*TORCHRUN, *MUSTER[1:], "train", recipe, "--gpus", "2"], tmp_path)
    said = process.communicate(timeout=200)[0]
    assert process.returncode != 0
    assert "torchrun has started 2 ranks already" in said
    assert not (tmp_path / "runs").exists()
