"""`muster bench p2p`: real pairs of living ranks; slow links on made-up matrices."""

from __future__ import annotations

import json
import time
from itertools import combinations

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from check.people import rank_names
from hosts import hosts, needs_namespaces  # noqa: F401
from muster.bench import p2p
from muster.bench import ranks as bench_ranks
from muster.bench.picture import draw_pairs
from muster.cli import app
from muster.probes.pairs import one_pair_at_a_time, round_robin
from processes import muster

pytestmark = pytest.mark.guides

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure the GPU")


@pytest.mark.parametrize("meetings", [one_pair_at_a_time, round_robin])
@pytest.mark.parametrize("world", [2, 3, 4, 7, 8, 17])
def test_every_pair_meets_once_and_nobody_is_in_two_places(meetings, world):
    turns = list(zip(*(meetings(rank, world) for rank in range(world)), strict=True))
    met = []
    for turn in turns:
        pairs = {(a, b) for a, b in enumerate(turn) if b is not None and a < b}
        assert all(turn[b] == a for a, b in pairs)
        assert meetings is round_robin or len(pairs) == 1
        met += pairs
    assert sorted(met) == list(combinations(range(world), 2))


def _measure(mesh, size):
    return p2p.measure(mesh, size)


def test_every_direction_is_measured_and_right(ranks):
    first, *others = ranks(4)(_measure, 2**18)
    json.dumps(first)
    assert all(other["rows"] == first["rows"] for other in others)
    pairs = [(row["from"], row["to"]) for row in first["rows"]]
    assert pairs == [(a, b) for a in range(4) for b in range(4) if a != b]
    for row in first["rows"]:
        assert row["wrong"] is None
        assert row["repeats"] >= 10
        assert first["gb_per_s"][row["from"]][row["to"]] == row["gb_per_s"] > 0
        assert first["latency_us"][row["from"]][row["to"]] == row["latency_us"] > 0
    assert [first["gb_per_s"][rank][rank] for rank in range(4)] == [None] * 4
    assert first["method"]["pairs_at_once"] == 1


def _delayed(mesh, seconds):
    """Whatever is sent leaves that much later."""
    real, often = dist.send, (p2p.LEAST, p2p.ENOUGH)

    def late(*arguments):
        time.sleep(seconds)
        real(*arguments)

    dist.send, p2p.LEAST, p2p.ENOUGH = late, 3, 3
    try:
        return p2p.measure(mesh, 4000)
    finally:
        dist.send, (p2p.LEAST, p2p.ENOUGH) = real, often


def test_latency_is_half_of_there_and_back_and_bandwidth_all_of_it(ranks):
    nap = 0.05
    for row in ranks(2)(_delayed, nap)[0]["rows"]:
        latency, there_and_back = row["latency_us"] / 1e6, 4000 / row["gb_per_s"] / 1e9
        assert latency > nap
        assert 1.2 < there_and_back / latency < 3.3


def _spoilt(mesh, size):
    """What rank 1 receives from rank 0 changes on the way."""
    real = dist.recv

    def spoils(tensor, src=None, **named):
        done = real(tensor, src, **named)
        if mesh.rank == 1 and src == 0 and len(tensor) > 7:
            tensor[7] += 1
        return done

    dist.recv = spoils
    try:
        return p2p.measure(mesh, size)
    finally:
        dist.recv = real


def test_a_block_that_arrives_wrong_is_told_and_ends_with_code_1(ranks, tmp_path, monkeypatch):
    document = ranks(2)(_spoilt, 4096)[0]
    assert [row["wrong"] is None for row in document["rows"]] == [False, True]
    assert "the first at position 7" in document["rows"][0]["wrong"]
    monkeypatch.setattr(bench_ranks, "measure", lambda *_, **__: document)
    done = CliRunner().invoke(app, ["bench", "p2p", "--dir", str(tmp_path)])
    assert done.exit_code == 1
    assert "wrong: rank 0 → rank 1: 1 of 1024 values" in done.output


def judged(people, speeds, **changes):
    usual = {"copy": 8.0, "gpu": False, "network": 12.5, "rates": {}, "routes": {}} | changes
    ranks = range(len(people.registered))
    rows = [
        {"from": a, "to": b, "gb_per_s": speeds.get((a, b), 5.0)}
        for a in ranks
        for b in ranks
        if a != b
    ]
    return p2p.slow_links(rows, dict.fromkeys(ranks, usual), people)


def test_slow_links_are_named_by_rank_host_and_reason_each_way():
    assert judged(rank_names(*"aaab"), {}) == []
    (slow,) = judged(rank_names(*"aaab"), {(2, 1): 2.0})
    assert (slow["from"], slow["to"]) == (2, 1)
    assert slow["words"] == (
        "rank 2 on a → rank 1 on a: 2 GB/s, but the median within a host is 5 GB/s"
    )
    (slow,) = judged(rank_names(*"aaab"), {(0, 3): 1.0})
    assert (
        slow["words"]
        == "rank 0 on a → rank 3 on b: 1 GB/s, but the hardware has 12.5 GB/s and should give 4.17"
    )
    rates = {"0": 300.0, "1": 300.0}
    slow = judged(rank_names(*"aa"), {(0, 1): 90.0, (1, 0): 250.0}, gpu=True, rates=rates)
    assert [(link["from"], link["to"]) for link in slow] == [(0, 1)]


@pytest.mark.parametrize("world", [2, pytest.param(16, marks=pytest.mark.full), 40])
def test_a_matrix_of_any_size_becomes_a_picture(tmp_path, world):
    matrix = [[None if a == b else 7.77 for b in range(world)] for a in range(world)]
    document = {"ranks": world, "gb_per_s": matrix, "latency_us": matrix}
    document |= {"slow": [{"from": 0, "to": 1}], "where": ["a"] * (world - 1) + ["b"]}
    (file,) = draw_pairs(tmp_path / "a.svg", document, "pairs")
    words = file.read_text()
    assert words.count("#b2182b") == 1  # the slow link's frame
    assert ("a  0" in words) == (world <= 16)
    assert ("7.77" in words) == (world <= 16)


@on_cpu
def test_the_command_prints_matrices_and_keeps_a_file_and_a_heat_map(tmp_path):
    done = muster("bench", "p2p", "--gpus", "2", "--size", "256K", folder=tmp_path)
    assert "GB/s, 256K from each row to each column" in done.stdout
    (kept,) = (tmp_path / "runs/bench").glob("p2p-cpu-2-*.json")
    assert kept.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(kept.read_text())["method"]["bytes"] == 2**18


def test_one_rank_alone_is_refused(ranks):
    done = CliRunner().invoke(app, ["bench", "p2p", "--gpus", "1"])
    assert "one rank has no peer" in str(done.exception)
    with pytest.raises(AssertionError, match="one rank has no peer"):
        ranks(1)(_measure, 1024)


@needs_namespaces
@pytest.mark.timeout(180)
@pytest.mark.full
def test_two_hosts_are_named_in_the_matrix(hosts, tmp_path):  # noqa: F811
    common = ["bench", "p2p", "--gpus", "1", "--nodes", "2", "--master-addr", hosts[0].address]
    both = [
        host.muster(*common, "--size", "64K", "--node-rank", str(node), folder=tmp_path)
        for node, host in enumerate(hosts)
    ]
    first = both[0].communicate(timeout=150)[0]
    assert [process.wait(30) for process in both] == [0, 0], first
    assert "0 on host-a" in first
    assert "1 on host-b" in first
