"""Whole checks in processes of their own, as users start them, on setups that are fit and that are not."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from hosts import hosts, needs_namespaces  # noqa: F401
from muster.cli import app
from processes import MUSTER, free_port, python_path, runs_module, start, until

LIMIT_S = 30.0  # of a whole check on two CPU ranks
STEPS = ["software", "devices", "ranks", "products", "collectives", "gradients", "balance", "links"]
STEPS += ["network"]
two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores are needed")


def crowd() -> float:
    """How many times longer things take while other programs want the same cores."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def start_check(*arguments: str, **env: str) -> subprocess.Popen[str]:
    return start([*MUSTER, "check", "--json", *arguments], errors=subprocess.PIPE, env=env)


def finish(process: subprocess.Popen[str], limit_s: float = 240.0) -> dict[str, Any]:
    out, err = process.communicate(timeout=limit_s)
    assert out.startswith("{"), out + err
    report = json.loads(out)
    assert process.returncode == (0 if report["fit"] else 1)
    return report


def failures(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [finding for finding in report["findings"] if finding["status"] == "fail"]


def start_ranks(
    world: int,
    *,
    plant: str = "",
    only: tuple[int, ...] | None = None,
    timeout: int = 60,
    **odd: Any,
) -> list[subprocess.Popen[str]]:
    """Ranks as a launcher starts them. `plant` is run first, in each; `odd` changes a variable of
    some ranks: LOCAL_RANK={0: 1}."""
    port, started = free_port(), []
    for rank in range(world) if only is None else only:
        variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank}
        variables |= {"LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables |= {name: of[rank] for name, of in odd.items() if rank in of}
        code = f"import sys\n{plant}\nfrom muster.checks.script import main\n"
        code += f"sys.exit(main(['--json', '--timeout', '{timeout}']))"
        env = {name: str(value) for name, value in variables.items()}
        started.append(start([sys.executable, "-c", code], errors=subprocess.PIPE, env=env))
    return started


def finish_ranks(started: list[subprocess.Popen[str]]) -> dict[str, Any]:
    try:
        return finish(started[0])
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.serial
def test_two_cpu_ranks_are_checked_within_the_limit():
    limit, started = LIMIT_S * crowd(), time.monotonic()
    report = finish(start_check("--gpus", "2", "--timeout", str(limit)), 2 * limit)
    spent = time.monotonic() - started
    print(f"a check of two CPU ranks took {spent / limit:.2f} of its limit")
    assert list(dict.fromkeys(f["step"] for f in report["findings"])) == STEPS
    slow = {"balance"}  # another test beside this one may really hold a rank up
    assert {f["step"] for f in failures(report)} <= slow
    assert report["world"] == 2
    assert spent < limit


def test_a_rank_that_never_arrives_is_named_within_the_limit():
    limit, started = 15 if crowd() < 2 else 24, time.monotonic()
    report = finish_ranks(start_ranks(3, only=(0, 2), timeout=limit))
    (fail,) = failures(report)
    assert fail["words"].startswith(f"rank 1 of 3 did not join within {limit} s; joined: ")
    assert "rank 0 on " in fail["words"]
    assert "rank 2 on " in fail["words"]
    assert fail["ranks"] == [1]
    assert time.monotonic() - started < limit + 30 * crowd()


@two_cores
def test_ranks_on_the_same_core_and_a_wrong_mapping_are_both_named_and_end_the_check():
    first = min(os.sched_getaffinity(0))
    plant = f"import os; os.sched_setaffinity(0, {{{first}}})"
    report = finish_ranks(start_ranks(2, plant=plant, LOCAL_RANK={0: 1, 1: 0}))
    mapping, clash = failures(report)
    assert "rank 0 is local rank 1, rank 1 is local rank 0" in mapping["words"]
    assert clash["words"].startswith(f"ranks 0 and 1 share core {first} of ")
    assert report["findings"][-1]["words"].startswith("skipped after the failure: products, ")


CORRUPTED = """
import os, torch, torch.distributed as dist
real = dist.all_reduce
def flipped(got, *args, **kwargs):
    done = real(got, *args, **kwargs)
    if os.environ["RANK"] == "1" and got.dtype == torch.float32:
        got[0] += 1
    return done
dist.all_reduce = flipped
"""


@pytest.mark.both
def test_a_corrupted_collective_ends_the_check():
    report = finish_ranks(start_ranks(2, plant=CORRUPTED))
    (fail,) = failures(report)
    assert fail["words"].startswith("all_reduce float32 is wrong on rank 1 on ")
    assert fail["cure"]
    assert report["findings"][-1]["words"].startswith("skipped after the failure: gradients, ")


def ranks_of(check: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(check.pid).children()
    return sorted(
        (c for c in children if runs_module(c, "muster.checks.rank")),
        key=lambda c: c.pid,  # started one after the other
    )


HELD = """
import os, sys
if "muster.checks.rank" in sys.orig_argv and os.environ["RANK"] == "1":
    import time
    import torch.distributed as dist
    def held(*args, **kwargs):
        open(os.environ["HELD"], "w").close()
        time.sleep(600)
    dist.all_reduce = held
"""


@pytest.mark.both
@pytest.mark.parametrize(
    "blow", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)]
)
def test_a_rank_that_dies_or_stops_in_the_middle_is_named(tmp_path, blow):
    """It has joined the others, and stays in its first all-reduce until then."""
    limit = 120 if blow == signal.SIGKILL else round(18 * crowd())
    (tmp_path / "sitecustomize.py").write_text(HELD)
    env = {"HELD": str(tmp_path / "held"), **python_path(tmp_path)}
    check = start_check("--gpus", "2", "--timeout", str(limit), **env)
    until((tmp_path / "held").exists, limit=120)
    victim = ranks_of(check)[1]
    victim.send_signal(blow)
    (fail,) = failures(finish(check))
    assert fail["ranks"] == [1]
    words = "was killed by SIGKILL" if blow == signal.SIGKILL else f"within {limit} s"
    assert words in fail["words"]
    assert not victim.is_running()


def test_a_busy_port_is_named_with_the_process_that_holds_it():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        (fail,) = failures(finish(start_check("--master-port", str(port))))
        assert f"port {port} on 127.0.0.1 is in use by" in fail["words"]
        assert f"pid {os.getpid()}" in fail["words"]
        assert "--master-port" in fail["cure"]
        ranks = start_ranks(2, only=(0,), MASTER_PORT={0: port})
        (fail,) = failures(finish_ranks(ranks))
        assert f"pid {os.getpid()}" in fail["words"]


@pytest.mark.guides
@needs_namespaces
def test_two_hosts_are_checked_together(hosts, tmp_path: Path):  # noqa: F811
    common = ["check", "--gpus", "1", "--nodes", "2", "--master-addr", hosts[0].address]
    common += ["--timeout", "60"]
    first, second = (
        host.muster(*common, "--node-rank", str(n), *["--json"] * (n == 0), folder=tmp_path)
        for n, host in enumerate(hosts)
    )
    words = first.communicate(timeout=150)[0]
    report = json.loads(words[words.index("{") :])
    assert report["hosts"] == ["host-a", "host-b"]
    found = {f["step"]: f for f in report["findings"] if f["status"] != "note"}
    assert found["ranks"]["status"] == found["collectives"]["status"] == "ok"
    assert "cannot resolve host-a" in str(report["findings"])  # the test's hosts have no names
    assert "node 0 finds this setup" in second.communicate(timeout=120)[0]
    assert second.returncode == first.returncode


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--recipe", "no-such-recipe"], "no-such-recipe"),
        (["training.steps=3"], "name it with --recipe"),
        (["--strategy", "fsdp"], "goes with --parity or --environment"),
        (["--nodes", "2"], "--node-rank"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(arguments, words):
    done = CliRunner().invoke(app, ["check", *arguments])
    assert done.exit_code != 0
    assert words in str(done.exception)
