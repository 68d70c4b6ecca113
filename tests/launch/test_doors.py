"""The same recipe through every door: whoever starts the ranks, the losses are the same."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from muster import runs
from muster.observe.results import read_lines
from muster.runs import Run

STEPS = 8
SMALL = [
    f"training.steps={STEPS}",
    "training.global_batch_size=8",
    "checkpoint.every_steps=2",
    "data.max_parquet_files=1",
    "evaluation.every_steps=null",
    "evaluation.final=false",
    "logging.tensorboard=false",
]
MUSTER = ["-m", "muster", "train", "speech", *SMALL]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
DEEPSPEED = str(Path(sys.executable).with_name("deepspeed"))
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]


def start(command: list[str], folder: Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "200", **env},
    )


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_lines(folder / "runs" / "latest" / "metrics.jsonl")]


def the_run(folder: Path) -> Run:
    return runs.find("latest", folder / "runs")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[float]:
    folder = tmp_path_factory.mktemp("alone")
    process = start([sys.executable, *MUSTER, "--gpus", "1"], folder)
    said = process.communicate(timeout=200)[0]
    assert process.returncode == 0, said
    return losses(folder)


@pytest.mark.parametrize(
    ("command", "env"),
    [
        pytest.param([*TORCHRUN, *MUSTER], {}, id="torchrun"),
        pytest.param(
            [*MPIRUN, *MUSTER],
            {},
            marks=pytest.mark.skipif(
                not shutil.which("mpirun"), reason="Open MPI is not installed"
            ),
            id="mpirun",
        ),
        pytest.param(
            [DEEPSPEED, "--num_gpus=2", "--module", *MUSTER[1:]],
            {"DS_ACCELERATOR": "cpu"},
            marks=pytest.mark.skipif(
                not Path(DEEPSPEED).exists(), reason="DeepSpeed is not installed"
            ),
            id="deepspeed",
        ),
    ],
)
def test_ranks_that_someone_else_started_train_alike(alone, tmp_path, command, env):
    process = start(command, tmp_path, **env)
    said = process.communicate(timeout=200)[0]
    assert process.returncode == 0, said
    assert the_run(tmp_path).state() == "finished"
    assert the_run(tmp_path).info()["ranks"] == 2
    assert losses(tmp_path) == pytest.approx(alone, rel=1e-5)


def test_ranks_that_torchrun_starts_again_go_on_in_their_run(alone, tmp_path):
    process = start([*TORCHRUN, "--max-restarts=2", *MUSTER], tmp_path)
    while len(losses(tmp_path)) < 3:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    psutil.Process(process.pid).children()[1].kill()
    said = process.communicate(timeout=200)[0]
    assert process.returncode == 0, said
    assert len(runs.every(tmp_path / "runs")) == 1
    assert "resumed at step" in said
    assert losses(tmp_path) == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    ("number", "to"), [(signal.SIGTERM, "supervisor"), (signal.SIGUSR1, "rank 1")]
)
def test_a_signal_asks_for_a_checkpoint_at_the_next_step(tmp_path, number, to):
    process = start([sys.executable, *MUSTER, "training.steps=2000", "--gpus", "2"], tmp_path)
    while len(losses(tmp_path)) < 3:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    supervisor = psutil.Process(the_run(tmp_path).info()["pid"])
    workers = [p for p in supervisor.children() if "muster.worker" in p.cmdline()]
    (supervisor if to == "supervisor" else workers[1]).send_signal(number)
    said = process.communicate(timeout=60)[0]
    assert the_run(tmp_path).state() == "stopped", said
    assert process.returncode == (143 if to == "supervisor" else 0)
    done = len(losses(tmp_path))
    manifest = the_run(tmp_path).path / "checkpoints" / f"step-{done}" / "manifest.json"
    assert manifest.exists()


def test_a_process_that_is_a_rank_already_starts_no_others(tmp_path):
    process = start([*TORCHRUN, *MUSTER, "--gpus", "2"], tmp_path)
    said = process.communicate(timeout=100)[0]
    assert process.returncode != 0
    assert "torchrun has started 2 ranks already" in said
    assert not (tmp_path / "runs").exists()
