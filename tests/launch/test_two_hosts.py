"""Two hosts with addresses of their own, two ranks on each, one recipe."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from hosts import Host, hosts, needs_namespaces  # noqa: F401
from muster import runs
from muster.observe.results import read_lines

pytestmark = [needs_namespaces, pytest.mark.timeout(240)]

STEPS = 12
SMALL = [
    f"training.steps={STEPS}",
    "training.global_batch_size=8",
    "checkpoint.every_steps=3",
    "data.max_parquet_files=1",
    "evaluation.every_steps=null",
    "evaluation.final=false",
    "logging.tensorboard=false",
]


def train(pair: tuple[Host, Host], folder: Path, *words: str) -> list[subprocess.Popen[str]]:
    common = ["--gpus", "2", "--nodes", "2", "--master-addr", pair[0].address]
    return [
        host.muster(
            "train", "speech", *SMALL, *words, *common, "--node-rank", str(i), folder=folder
        )
        for i, host in enumerate(pair)
    ]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_lines(folder / "runs" / "latest" / "metrics.jsonl")]


def norms(folder: Path) -> list[float]:
    return [line["grad_norm"] for line in read_lines(folder / "runs" / "latest" / "metrics.jsonl")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    command = [sys.executable, "-m", "muster", "train", "speech", *SMALL, "--gpus", "1"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=200)
    return folder


def test_two_hosts_train_as_one_process_does_and_restart_together(hosts, alone, tmp_path):  # noqa: F811
    both = train(hosts, tmp_path)
    while len(losses(tmp_path)) < 5:
        assert both[0].poll() is None, both[0].communicate()[0]
        time.sleep(0.02)
    found = subprocess.run(
        ["ip", "netns", "pids", hosts[1].namespace], capture_output=True, text=True
    )
    victims = [
        p
        for p in found.stdout.split()
        if b"muster.worker" in Path(f"/proc/{p}/cmdline").read_bytes()
    ]
    subprocess.run(["kill", "-9", victims[0]], check=True)
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    run = runs.find("latest", tmp_path / "runs")
    assert run.info()["nodes"] == ["host-a", "host-b"]
    assert run.info()["restarts"] == 1
    assert "was killed (SIGKILL)" in said[0]
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-5)
    assert norms(tmp_path) == pytest.approx(norms(alone), rel=1e-4)


def test_a_cut_link_is_reported_by_name_within_the_limit(hosts, tmp_path):  # noqa: F811
    both = train(hosts, tmp_path, "training.steps=5000", "distributed.timeout_s=24")
    while len(losses(tmp_path)) < 3:
        assert both[0].poll() is None, both[0].communicate()[0]
        time.sleep(0.02)
    hosts[1].cut()
    began = time.monotonic()
    said = [process.communicate(timeout=120)[0] for process in both]
    assert time.monotonic() - began < 24 + 15  # the limit, and the time to end ranks and say so
    assert [process.returncode for process in both] == [1, 1]
    assert "Node 1 (host-b) has not been heard of" in said[0]
    assert "Node 0 (host-a) has not been heard of" in said[1]


def test_a_node_with_another_recipe_is_refused(hosts, tmp_path):  # noqa: F811
    common = ["--gpus", "1", "--nodes", "2", "--master-addr", hosts[0].address]
    first = hosts[0].muster("train", "speech", *SMALL, *common, "--node-rank", "0", folder=tmp_path)
    other = hosts[1].muster(
        "train", "speech", *SMALL, "training.lr=0.5", *common, "--node-rank", "1", folder=tmp_path
    )
    said = other.communicate()[0]
    assert other.returncode == 2
    assert "node 0 trains with another recipe (training.lr: 0.004 there, 0.5 here)" in said
    told = first.communicate(timeout=60)[0]
    assert first.returncode == 1
    assert "node 1 has another recipe (training.lr" in " ".join(told.split())


def test_a_node_that_never_comes_is_named(hosts, tmp_path):  # noqa: F811
    words = ["--gpus", "1", "--nodes", "2", "--master-addr", hosts[0].address, "--node-rank", "0"]
    lonely = hosts[0].muster(
        "train", "speech", *SMALL, "distributed.timeout_s=4", *words, folder=tmp_path
    )
    said = lonely.communicate(timeout=90)[0]
    assert lonely.returncode == 1
    assert "node 1 did not come to 10.77.0.1:29500 within 4 s" in said


def test_addresses_that_cannot_work_are_refused(hosts, tmp_path):  # noqa: F811
    for rank, address, words in (
        (0, "127.0.0.1", "means each machine itself"),
        (0, "10.77.0.2", "is not an address of this machine"),
        (0, "no-such-host", "cannot be resolved on host-a"),
        (1, "localhost", "means each machine itself"),
        (1, "10.77.0.1", "is this machine's own"),
    ):
        process = hosts[0].muster(
            "train", "speech", *SMALL, "--gpus", "1", "--nodes", "2", "--node-rank", str(rank),
            "--master-addr", address, folder=tmp_path,
        )  # fmt: skip
        said = process.communicate(timeout=90)[0]
        assert process.returncode != 0
        assert words in " ".join(said.split()), said


def test_the_guides_torchrun_command_works_on_two_hosts(hosts, alone, tmp_path):  # noqa: F811
    script = Path(__file__).parents[2] / "systems" / "multi-gpu" / "run_fsdp_standalone.py"
    command = ["--nnodes=2", "--nproc_per_node=1", f"--master_addr={hosts[0].address}"]
    both = [
        host.start(
            sys.executable,
            "-m",
            "torch.distributed.run",
            *command,
            f"--node_rank={i}",
            "--master_port=29511",
            str(script),
            "--recipe",
            "speech",
            *SMALL,
            folder=tmp_path,
        )
        for i, host in enumerate(hosts)
    ]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-5)
