"""`muster bench collectives`: real collectives on living ranks, faults planted in one of them."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import processes
from hosts import hosts, needs_namespaces  # noqa: F401
from muster.bench import collectives as bench
from muster.bench import device as bench_device
from muster.bench import ranks as bench_ranks
from muster.bench.picture import draw_collectives
from muster.bench.timing import spread, spread_of
from muster.cli import app
from muster.cli.bench import collectives as cli
from muster.cli.bench.common import size_in, size_of
from muster.errors import DataError, LaunchError
from muster.hardware import catalogue
from muster.planner.time import Cluster
from muster.probes.collectives import COLLECTIVES, addend, bus_share, compare, pattern, total
from processes import runs_module

COMMAND = [*processes.MUSTER, "bench", "collectives"]
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure the GPU")
FORMS = [(name, where) for name, kind in COLLECTIVES.items() for where in kind.wheres]


@pytest.mark.parametrize("world", [1, 2, 3, 16, 17, 40])
def test_the_sum_is_that_of_all_ranks_and_exact_in_bfloat16(world):
    at = torch.arange(5000)
    added = torch.stack([addend(rank, at, world) for rank in range(world)]).sum(0)
    assert torch.equal(total(at, world), added)
    assert added.max() < 256
    assert torch.equal(added.bfloat16().long(), added)


@pytest.mark.parametrize("shift", [1, 11, 121, 1024, 2816])
def test_a_shifted_block_or_another_rank_s_is_noticed(shift):
    at = torch.arange(4096)
    assert compare(pattern(1, at + shift), lambda at: pattern(1, at))
    assert compare(pattern(2, at), lambda at: pattern(1, at))
    words = compare(torch.where(at == 3000, 0, pattern(1, at)), lambda at: pattern(1, at))
    assert words.startswith("1 of 4096 values are wrong, the first at position 3000: 0 instead of ")


def test_bus_bandwidth_is_counted_as_nccl_tests_do():
    shares = {name: bus_share(name, 8) for name in COLLECTIVES}
    part = 7 / 8
    assert shares == {
        "all_reduce": 2 * part,
        "all_gather": part,
        "reduce_scatter": part,
        "broadcast": 1.0,
        "all_to_all": part,
    }
    assert {bus_share(name, 1) for name in COLLECTIVES} == {0.0}


@pytest.mark.parametrize(
    ("world", "kinds"),
    [
        (2, ["float32", "bfloat16", "int64"]),
        pytest.param(4, ["int64"], marks=pytest.mark.full),
    ],
)
def test_every_collective_form_and_number_type_is_measured_and_right(ranks, world, kinds):
    options = {"dtypes": kinds, "smallest": 1000, "largest": 1000}
    first, *others = ranks(world)(_measure, options)
    rows = first["rows"]
    assert [(row["collective"], row["where"]) for row in rows if row["dtype"] == "int64"] == FORMS
    assert len(rows) == len(kinds) * len(FORMS)
    assert first["left_out"] == []
    assert bench.wrong_rows(first) == []
    assert all(other["rows"] == rows for other in others)
    json.dumps(first)
    for row in rows:
        size = {"float32": 4, "bfloat16": 2, "int64": 8}[row["dtype"]]
        assert row["bytes"] == 1000 // size // world * world * size
        rate = row["bytes"] / row["time_us"] / 1e3
        assert row["algorithm_gb_per_s"] == pytest.approx(rate)
        share = bus_share(row["collective"], world)
        assert row["bus_gb_per_s"] == pytest.approx(rate * share)
        assert row["time_us"] <= row["p99_us"]
        assert row["repeats"] == 100


def _measure(mesh, options):
    return bench.measure(mesh, **options)


def test_one_rank_has_times_but_no_bus(ranks, tmp_path):
    (alone,) = ranks(1)(_measure, {"smallest": 4096, "largest": 4096})
    assert [(row["collective"], row["where"]) for row in alone["rows"]] == FORMS
    assert {row["bus_gb_per_s"] for row in alone["rows"]} == {0.0}
    assert min(row["algorithm_gb_per_s"] for row in alone["rows"]) > 0
    assert "bus bandwidth is 0" in bench.save_for_planner(alone, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert draw_collectives(tmp_path / "a.png", alone["rows"], "one")[0].stat().st_size > 5000


def _flipped(mesh, options, torch_name, at):
    """One value of what the collective gives rank 1 is off by one."""
    real = getattr(dist, torch_name)

    def broken(got, *others, **named):
        done = real(got, *others, **named)
        if mesh.rank == 1 and len(got) > at and got.dtype == torch.float32:
            got[at] += 1
        return done

    setattr(dist, torch_name, broken)
    try:
        return bench.measure(mesh, **options)
    finally:
        setattr(dist, torch_name, real)


def _torch_name(name):
    newer = {"all_gather": "all_gather_single", "reduce_scatter": "reduce_scatter_single"}
    older = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    if name == "all_to_all":
        return "all_to_all_single"
    return newer.get(name, name) if hasattr(dist, newer.get(name, name)) else older[name]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_wrong_value_is_named_with_its_rank_and_position(ranks, name):
    options = {"only": [name], "smallest": 1024, "largest": 1024}
    (document, _) = ranks(2)(_flipped, options, _torch_name(name), 100)
    wrong = bench.wrong_rows(document)
    assert [row["where"] for row in wrong] == list(COLLECTIVES[name].wheres)
    for row in wrong:
        (words,) = row["wrong"]
        assert words.startswith("rank 1: 1 of ")
        assert "the first at position 100: " in words


def _refusing(mesh, words):
    def refuse(*arguments, **named):
        raise RuntimeError(words)

    real = dist.all_to_all_single
    dist.all_to_all_single = refuse
    try:
        options = {"only": ["all_to_all", "broadcast"], "smallest": 1024, "largest": 4096}
        return bench.measure(mesh, **options)
    finally:
        dist.all_to_all_single = real


def test_what_a_backend_does_not_offer_is_left_out_and_said(ranks):
    document = ranks(2)(_refusing, "gloo does not support alltoall\nstack")[0]
    assert document["left_out"] == [
        {
            "collective": "all_to_all",
            "dtype": "float32",
            "where": "out",
            "refused": "gloo does not support alltoall",
        }
    ]
    assert {row["collective"] for row in document["rows"]} == {"broadcast"}
    with pytest.raises(AssertionError, match="Timed out waiting"):
        ranks(2)(_refusing, "Timed out waiting 1000ms")


def test_sizes_grow_by_the_factor_and_every_rank_gets_as_much():
    assert list(bench.steps(1024, 70000, 4)) == [1024, 4096, 16384, 65536]
    assert bench.counts([1024, 4096], 4, 3) == [255, 1023]
    assert bench.counts([16, 64], 8, 32) == [32]  # one number for each rank, once


def test_p99_is_the_nearest_rank():
    found = spread([float(n) for n in range(100, 0, -1)])
    assert (found.median, found.p99, found.repeats) == (50.5, 99.0, 100)
    assert spread([3.0, 1.0, 2.0]).p99 == 3.0


def _slow_rank(mesh, seconds):
    nap = seconds if mesh.rank == 1 else 0.0
    return spread_of(mesh, lambda: time.sleep(nap), 2**30)


def test_a_repeat_takes_as_long_as_its_slowest_rank(ranks):
    """Every rank sleeps as often as rank 0 decides; the times are rank 1's."""
    for found in ranks(2)(_slow_rank, 0.005):
        assert 0.005 <= found.median < 0.1
        assert found.repeats >= 10


def _larger(mesh):
    free, bench.largest_size = bench.largest_size, lambda mesh: 5000
    try:
        document = bench.measure(mesh, only=["broadcast"], smallest=1024, largest=2**40)
        with pytest.raises(LaunchError, match="--min 8192: only arrays up to 5000 bytes fit"):
            bench.measure(mesh, smallest=8192)
    finally:
        bench.largest_size = free
    return document, bench.largest_size(mesh)


def test_what_does_not_fit_into_memory_is_left_out_and_said(ranks):
    document, room = ranks(2)(_larger)[0]
    assert [row["bytes"] for row in document["rows"]] == [1024, 4096]
    assert document["largest_that_fits"] == 5000
    assert 2**20 < room < psutil.virtual_memory().total / 8


def learned(ranks=2, names="a", device="cpu", **rates):
    """A document with all_reduce rows of these bus bandwidths, by size."""
    row = {"collective": "all_reduce", "dtype": "float32", "where": "in", "wrong": []}
    rows = [row | {"bytes": int(size[1:]), "bus_gb_per_s": rate} for size, rate in rates.items()]
    head = {"device": device, "title": "A Card", "ranks": ranks, "hosts": list(names)}
    return head | {"rows": rows}


def test_the_planner_sees_the_best_of_large_all_reduces(tmp_path):
    document = learned(b1024=99.0, b4194304=3.0, b16777216=4.0)
    document["rows"].append(document["rows"][2] | {"dtype": "int64", "bus_gb_per_s": 77.0})
    document["rows"].append(document["rows"][2] | {"where": "out", "bus_gb_per_s": 66.0})
    words = bench.save_for_planner(document, tmp_path)
    assert words == (
        f"the planner now uses 4 GB/s: link_gb_per_s in {tmp_path / 'device-cpu.json'}"
    )
    mine = catalogue.own(catalogue.cpu(2), tmp_path)
    assert Cluster(mine, 2, 2).bandwidth(2) == 4e9
    bench.save_for_planner(learned(8, "ab", b4194304=2.0), tmp_path)
    mine = catalogue.own(catalogue.cpu(4), tmp_path)
    assert mine.measured["network_gb_per_s"] == 0.5
    cluster = Cluster(mine, 8, 4)
    assert (cluster.bandwidth(4), cluster.bandwidth(8)) == (4e9, 2e9)


def test_a_gpu_that_nobody_knows_needs_its_own_file_first(tmp_path):
    document = learned(device="a-card", b4194304=3.0)
    assert "no A Card: run `muster bench device` once" in bench.save_for_planner(document, tmp_path)
    assert list(tmp_path.iterdir()) == []
    known = catalogue.find("h100").as_dict()
    path = tmp_path / "device-a-card.json"
    path.write_text(json.dumps({"accelerator": known, "measured": {"launch_us": 5.0}, "x": 1}))
    assert "link_gb_per_s" in bench.save_for_planner(document, tmp_path)
    kept = json.loads(path.read_text())
    assert kept["measured"] == {"launch_us": 5.0, "link_gb_per_s": 3.0}
    assert (kept["x"], kept["accelerator"]) == (1, known)
    path.write_text("{")
    with pytest.raises(DataError, match=r"device-a-card\.json"):
        bench.save_for_planner(document, tmp_path)


def test_nothing_is_learnt_from_small_or_wrong_ones(tmp_path):
    assert "no all_reduce of 1 MiB" in bench.save_for_planner(learned(b1024=3.0), tmp_path)
    document = learned(b4194304=3.0)
    document["rows"][0]["wrong"] = ["rank 1: …"]
    assert "values are wrong" in bench.save_for_planner(document, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.guides
@on_cpu
def test_a_new_measurement_of_the_device_keeps_what_is_known_of_links(tmp_path):
    bench.save_for_planner(learned(b4194304=3.0), tmp_path)
    document, path = bench_device.bench(tmp_path, 0.1)
    assert json.loads(path.read_text()) == document
    assert document["measured"]["link_gb_per_s"] == 3.0
    assert document["measured"]["launch_us"] > 0


@pytest.mark.guides
@on_cpu
def test_the_command_measures_keeps_draws_and_teaches(tmp_path):
    sizes = ["--min", "256K", "--max", "1M"]
    words = ["collectives", "--only", "all_reduce", *sizes, "--gpus", "2"]
    done = processes.muster("bench", *words, folder=tmp_path)
    for words in ("2 ranks, CPU", "all_reduce", "256K", "bus", "the planner now uses"):
        assert words in done.stdout
    (kept,) = (tmp_path / "runs/bench").glob("collectives-cpu-2-*.json")
    assert kept.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads(kept.read_text())["rows"]
    assert [row["bytes"] for row in rows] == [2**18, 2**20] * 2
    (best,) = (r["bus_gb_per_s"] for r in rows if (r["bytes"], r["where"]) == (2**20, "in"))
    mine = catalogue.own(catalogue.cpu(2), tmp_path / "runs/bench")
    assert mine.measured["link_gb_per_s"] == best


def _told(mesh, options):
    told = []
    rows = bench.measure(mesh, **options, tell=lambda *far: told.append(far))["rows"]
    return told, len(rows)


def test_every_row_is_told_before_it_is_measured(ranks):
    options = {"only": ["broadcast", "all_reduce"], "smallest": 1024, "largest": 4096}
    for told, rows in ranks(2)(_told, options):
        assert told == [(done, rows) for done in range(rows)]


def test_how_far_rank_0_is_comes_from_its_file_and_a_half_written_one_is_no_news(tmp_path):
    told = []
    path = tmp_path / "answer.progress"
    for text in (None, "", "3", "3 48", "x y"):
        if text is not None:
            path.write_text(text)
        bench_ranks._pass_on(path, lambda *far: told.append(far))
    assert told == [(3, 48)]


@pytest.mark.guides
def test_a_measurement_is_set_beside_an_earlier_one(ranks, tmp_path, monkeypatch):
    document = ranks(2)(_measure, {"only": ["broadcast"], "smallest": 1024, "largest": 1024})[0]
    monkeypatch.setattr(bench_ranks, "measure", lambda *_, **__: document)
    asked = ["bench", "collectives", "--dir", str(tmp_path)]
    assert json.loads(CliRunner().invoke(app, [*asked, "--json"]).output) == document
    document["rows"][0]["time_us"] *= 3
    done = CliRunner().invoke(app, [*asked, "--against", "last"])
    assert done.exit_code == 0
    assert "3.00" in done.output
    assert (
        "3.00 × the time before, in the median of 1 rows; 1 of them worse"
        in done.output.replace("\n", " ")
    )


def test_wrong_values_are_told_and_end_with_code_1(ranks, tmp_path, monkeypatch):
    """A real measurement with a broken collective, shown by the command."""
    options = {"only": ["all_reduce"], "smallest": 2**20, "largest": 2**20}
    document = ranks(2)(_flipped, options, "all_reduce", 100)[0]
    monkeypatch.setattr(bench_ranks, "measure", lambda *_, **__: document)
    done = CliRunner().invoke(app, ["bench", "collectives", "--dir", str(tmp_path)])
    assert done.exit_code == 1
    assert "wrong: all_reduce float32 in, 1M, rank 1: 1 of 262144 values" in done.output
    assert "values are wrong: nothing is saved for the planner" in done.output
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".json", ".png"]


def ranks_under(parent: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in parent.children():
        with suppress(psutil.Error):  # it has just ended
            if runs_module(child, "muster.bench.ranks"):
                found.append(child)
    return found


def met(parent: psutil.Process) -> list[psutil.Process]:
    """Its two ranks, once they are connected to each other."""

    def connections(rank: psutil.Process) -> int:
        return len([c for c in rank.net_connections("tcp") if c.status == "ESTABLISHED"])

    processes.until(lambda: len(ranks_under(parent)) == 2)
    processes.until(lambda: connections(ranks_under(parent)[1]) > 2)
    return ranks_under(parent)


@on_cpu
def test_a_rank_that_dies_ends_the_command_with_a_sentence(tmp_path):
    with processes.start([*COMMAND, "--gpus", "2"], tmp_path) as started:
        victims = met(psutil.Process(started.pid))
        victims[1].send_signal(signal.SIGKILL)
        words = started.communicate(timeout=120)[0]
    assert started.returncode == 2
    assert "rank 1 was killed by SIGKILL" in words
    assert not any(victim.is_running() for victim in victims)


@on_cpu
def test_ranks_end_with_a_command_that_is_killed_as_they_start(tmp_path):
    with processes.start([*COMMAND, "--gpus", "2"], tmp_path) as started:
        parent, orphans = psutil.Process(started.pid), []
        while len(orphans) < 2:
            assert started.poll() is None
            orphans = ranks_under(parent)
        started.send_signal(signal.SIGKILL)
    processes.until(lambda: not any(processes.lives(orphan.pid) for orphan in orphans))


def test_more_ranks_than_memory_holds_are_refused_before_one_starts(tmp_path):
    done = processes.muster("bench", "collectives", "--gpus", "100000", folder=tmp_path, code=2)
    assert "--gpus 100000: this machine has no memory for so many processes" in done.stderr
    assert "start at most " in done.stderr


HANGING = """
from muster.bench.ranks import measure
from muster.launch.cluster import Node
measure("collectives", {"largest": 2**24}, 2, Node(), timeout_s=10.0)
"""
STOPS = """
import os, sys
if "muster.bench.ranks" in sys.orig_argv and os.environ["RANK"] == "1":
    import signal
    import torch.distributed as dist
    dist.all_reduce = lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP)
"""


@on_cpu
@pytest.mark.full
def test_a_rank_that_hangs_is_named_by_those_that_waited(tmp_path):
    """Stopped once it has met the others, it answers nobody and does not end either."""
    (tmp_path / "sitecustomize.py").write_text(STOPS)
    env = processes.python_path(tmp_path)
    with processes.start([sys.executable, "-c", HANGING], tmp_path, env=env) as started:
        words = started.communicate(timeout=120)[0]
    assert re.search(r"LaunchError: rank 0 .*[Tt]imed out.* stuck: rank 1", words)


@needs_namespaces
@pytest.mark.timeout(180)
@pytest.mark.full
def test_two_hosts_teach_the_planner_about_the_network(hosts, tmp_path):  # noqa: F811
    size = ["--min", "1M", "--max", "1M", "--only", "all_reduce", "--gpus", "1"]
    common = ["bench", "collectives", *size, "--nodes", "2", "--master-addr", hosts[0].address]
    both = [
        host.muster(*common, "--node-rank", str(node), folder=tmp_path)
        for node, host in enumerate(hosts)
    ]
    first, second = (process.communicate(timeout=150)[0] for process in both)
    assert [process.returncode for process in both] == [0, 0], first + second
    assert "2 ranks on 2 hosts" in first
    assert "for each of 1 ranks of a host: network_gb_per_s" in first
    assert "kept in" not in second


def test_names_and_sizes_on_the_command_line_are_those_of_the_measurement():
    assert tuple(COLLECTIVES) == cli.NAMES
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in cli.DTYPES)
    sizes = {"1K": 1024, "64m": 64 * 2**20, "1GiB": 2**30, "4096": 4096, "2 KB": 2048}
    assert {words: size_in("--min", words) for words in sizes} == sizes
    assert [size_of(n) for n in (1000, 1024, 64 * 2**20, 2**30, 1572864)] == [
        *("1000", "1K", "64M", "1G", "1.5M"),
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--min", "0"], "--min 0: expected a size"),
        (["--max", "12Q"], "--max 12Q: expected a size"),
        (["--max", "1K", "--min", "1M"], "--max 1K is less than --min 1M"),
        (["--dtype", "float31"], "--dtype float31: expected one of float32"),
        (["--only", "gossip"], "--only gossip: expected one of all_reduce"),
    ],
)
def test_mistakes_are_refused(arguments, words):
    done = CliRunner().invoke(app, ["bench", "collectives", *arguments])
    assert words in str(done.exception)


def test_a_full_disk_is_named_where_the_planner_should_learn(small_disk):
    with suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    with pytest.raises(LaunchError, match=r"device-cpu\.json: No space left.* name another folder"):
        bench.save_for_planner(learned(2, "a", b4194304=2.0), small_disk)


@pytest.mark.parametrize("world", [2, 3, 8, 12, 16, 17, 23, 33, 64])
def test_no_two_ranks_bring_the_same_numbers(world):
    """Else a broadcast that did nothing, or two parts that were swapped, would pass."""
    at = torch.arange(1024)
    for bring in (pattern, partial(addend, world=world)):
        assert len({tuple(bring(rank, at).tolist()) for rank in range(world)}) == world


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "broadcast"])
def test_a_part_that_does_not_come_is_noticed_among_64_ranks_too(name):
    """Every rank's every number shows, however small its part."""
    mesh = SimpleNamespace(rank=5, world=64, device=torch.device("cpu"))
    trial = COLLECTIVES[name].prepare(mesh, 4 * 64, torch.float32, COLLECTIVES[name].wheres[-1])
    expected = trial.expected(torch.arange(4 * 64))
    trial.got.fill_(-1).copy_(expected)
    assert compare(trial.got, trial.expected) is None
    for at in range(0, 4 * 64, 4):
        for lost in (-1, 0):
            trial.got.copy_(expected)[at : at + 4] = lost
            assert compare(trial.got, trial.expected).startswith("4 of 256 values are wrong")
