"""Two hosts with addresses of their own, two ranks on each, one recipe."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from hosts import Host, hosts, needs_namespaces  # noqa: F401
from muster import run_directory
from muster.observe.results import read_lines
from tiny import LONG, held_after

pytestmark = [needs_namespaces, pytest.mark.timeout(240)]

STEPS = 16


def train(
    pair: tuple[Host, Host], recipe: str, folder: Path, *words: str, **env: str
) -> list[subprocess.Popen[str]]:
    common = ["--gpus", "2", "--nodes", "2", "--master-addr", pair[0].address]
    return [
        host.muster("train", recipe, *words, *common, "--node-rank", str(i), folder=folder, **env)
        for i, host in enumerate(pair)
    ]


def figures(folder: Path, name: str) -> list[float]:
    return [line[name] for line in read_lines(folder / "runs" / "latest" / "metrics.jsonl")]


def assert_as_alone(undisturbed, folder: Path) -> None:
    """Sums in another order are all that differs from one process."""
    alone = undisturbed(1)[:STEPS]
    for name, rel in (("loss", 1e-5), ("grad_norm", 1e-4)):
        assert figures(folder, name) == pytest.approx([line[name] for line in alone], rel=rel)


@pytest.mark.guides
def test_two_hosts_train_as_one_process_does_and_restart_together(
    hosts,  # noqa: F811
    recipe,
    undisturbed,
    tmp_path,
):
    go = tmp_path / "go"
    env = held_after(STEPS - 1, tmp_path, go)
    both = train(hosts, recipe, tmp_path, f"training.steps={STEPS}", **env)
    while len(figures(tmp_path, "loss")) < 5:
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
    go.touch()
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    run = run_directory.find("latest", tmp_path / "runs")
    assert run.info()["nodes"] == ["host-a", "host-b"]
    assert run.info()["restarts"] == 1
    assert re.search(r"rank \d was killed at step \d+ \(SIGKILL\); restarting", said[0])
    assert_as_alone(undisturbed, tmp_path)


@pytest.mark.guides
def test_a_cut_link_is_reported_by_name_within_the_limit(hosts, recipe, tmp_path):  # noqa: F811
    both = train(hosts, recipe, tmp_path, LONG, "distributed.timeout_s=16")
    while len(figures(tmp_path, "loss")) < 3:
        assert both[0].poll() is None, both[0].communicate()[0]
        time.sleep(0.02)
    hosts[1].cut()
    began = time.monotonic()
    said = [process.communicate(timeout=120)[0] for process in both]
    spent = time.monotonic() - began  # TCP by itself takes a quarter of an hour
    assert spent < 16 + 40  # the limit, and the time to end ranks and say so on a busy machine
    assert [process.returncode for process in both] == [1, 1]
    assert "Node 1 (host-b) has sent no heartbeat" in said[0]
    assert "Node 0 (host-a) has sent no heartbeat" in said[1]


def test_a_node_with_another_recipe_is_refused(hosts, recipe, tmp_path):  # noqa: F811
    common = ["--gpus", "1", "--nodes", "2", "--master-addr", hosts[0].address]
    first = hosts[0].muster("train", recipe, *common, "--node-rank", "0", folder=tmp_path)
    other = hosts[1].muster(
        "train", recipe, "training.lr=0.5", *common, "--node-rank", "1", folder=tmp_path
    )
    said = other.communicate()[0]
    assert other.returncode == 2
    assert "node 0 trains with another recipe (training.lr: 0.0001 there, 0.5 here)" in said
    told = first.communicate(timeout=120)[0]
    assert first.returncode == 1
    assert "node 1 has another recipe (training.lr" in " ".join(told.split())


@pytest.mark.guides
def test_a_node_that_never_comes_is_named(hosts, recipe, tmp_path):  # noqa: F811
    words = ["--gpus", "1", "--nodes", "2", "--master-addr", hosts[0].address, "--node-rank", "0"]
    lonely = hosts[0].muster("train", recipe, "distributed.timeout_s=4", *words, folder=tmp_path)
    said = lonely.communicate(timeout=90)[0]
    assert lonely.returncode == 1
    assert "node 1 did not join at 10.77.0.1:29500 within 4 s" in said


def test_addresses_that_cannot_work_are_refused(hosts, recipe, tmp_path):  # noqa: F811
    for rank, address, words in (
        (0, "127.0.0.1", "is a loopback address"),
        (0, "10.77.0.2", "is not an address of this machine"),
        (0, "no-such-host", "cannot be resolved on host-a"),
        (1, "localhost", "is a loopback address"),
        (1, "10.77.0.1", "is an address of this machine"),
    ):
        process = hosts[0].muster(
            "train", recipe, "--gpus", "1", "--nodes", "2", "--node-rank", str(rank),
            "--master-addr", address, folder=tmp_path,
        )  # fmt: skip
        said = process.communicate(timeout=90)[0]
        assert process.returncode != 0
        assert words in " ".join(said.split()), said


@pytest.mark.full
def test_the_guides_torchrun_command_works_on_two_hosts(hosts, recipe, undisturbed, tmp_path):  # noqa: F811
    script = Path(__file__).parents[2] / "systems" / "multi-gpu" / "run_fsdp_standalone.py"
    command = ["torchrun", "--nnodes=2", "--nproc_per_node=1", "--master_port=29511"]
    command.append(f"--master_addr={hosts[0].address}")
    words = ["--recipe", recipe, f"training.steps={STEPS}"]
    both = [
        host.start(*command, f"--node_rank={i}", script, *words, folder=tmp_path)
        for i, host in enumerate(hosts)
    ]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert_as_alone(undisturbed, tmp_path)
