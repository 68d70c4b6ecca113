"""`muster bench p2p`: bandwidth and latency from every rank to every other. GB = 10⁹ bytes."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from muster.bench.files import Document
from muster.bench.results import head
from muster.bench.timing import ENOUGH, LEAST, WARM_UP
from muster.checks import links
from muster.checks.context import RankReport, own_address
from muster.checks.findings import RankNames
from muster.errors import LaunchError
from muster.hardware import inventory
from muster.launch import cluster
from muster.observe.progress import Report, silent
from muster.parallel.mesh import Mesh
from muster.probes.collectives import compare, pattern, write
from muster.probes.pairs import (
    ONE_AT_A_TIME,
    agree_on_count,
    one_pair_at_a_time,
    one_way,
    round_robin,
)
from muster.probes.repeats import repeat

BLOCK = {"cuda": 64 * 2**20, "cpu": 4 * 2**20}  # bytes
PAIR_S = 0.2  # of one direction, roughly

Pair = tuple[int, int]  # from, to


def measure(mesh: Mesh, size: int | None = None, tell: Report = silent) -> Document:
    if mesh.world == 1:
        raise LaunchError("one rank has no peer; start at least two (--gpus 2)")
    bytes_sent = size or BLOCK[mesh.device.type]
    schedule = one_pair_at_a_time if mesh.world <= ONE_AT_A_TIME else round_robin
    document, report = head("p2p", mesh), rank_report(mesh, together=schedule is round_robin)
    mine: dict[Pair, dict[str, Any]] = {}
    rounds = list(schedule(mesh.rank, mesh.world))
    for number, other in enumerate(rounds):
        tell(number, len(rounds))
        mesh.barrier()
        if other is not None:
            mine |= measure_pair(mesh, other, bytes_sent)
    mesh.barrier()
    rows = directions(mesh.gather(mine))
    reports = dict(enumerate(mesh.gather(report)))
    rank_names = RankNames(reports)
    return document | {
        "keys": ["from", "to"],
        "figure": "gb_per_s",
        "better": "higher",
        "method": {
            "statistic": "median",
            "bytes": bytes_sent,
            "warm_up_calls": WARM_UP,
            "pairs_at_once": 1 if schedule is one_pair_at_a_time else mesh.world // 2,
        },
        "block_bytes": bytes_sent,
        "where": [rank_names.host(rank) for rank in range(mesh.world)],
        "rows": rows,
        "gb_per_s": matrix(rows, "gb_per_s", mesh.world),
        "latency_us": matrix(rows, "latency_us", mesh.world),
        "slow": slow_links(rows, reports, rank_names),
    }


def rank_report(mesh: Mesh, together: bool) -> RankReport:
    """This rank's host and what its hardware should reach, for one pair or for all `together`."""
    rank_info = cluster.detect(os.environ)
    sharing = rank_info.local_world if together else 1
    return links.link_report(mesh, rank_info.address, inventory.detect(), sharing) | {
        "host": os.uname().nodename,
        "net": os.stat("/proc/self/ns/net").st_ino,
        "address": own_address(rank_info.address),
        "local_rank": mesh.local_rank,
    }


def measure_pair(mesh: Mesh, other: int, size: int) -> dict[Pair, dict[str, Any]]:
    """Both directions between this rank and `other`: the sender's times, and what the receiver finds
    wrong in the block."""
    block = torch.empty(max(1, size // 4), device=mesh.device)
    ack = torch.ones(1, device=mesh.device)
    results: dict[Pair, dict[str, Any]] = {}
    for sender, receiver in sorted([(mesh.rank, other), (other, mesh.rank)]):
        write(block, partial(pattern, mesh.rank))
        long = _times(mesh, partial(one_way, block, ack, sender, receiver), other, LEAST)
        quick = _times(mesh, partial(one_way, ack, ack, sender, receiver), other, ENOUGH)
        if mesh.rank == sender:
            results[sender, receiver] = {
                "gb_per_s": block.nbytes / statistics.median(long) / 1e9,
                "latency_us": statistics.median(quick) / 2 * 1e6,  # half a round trip
                "repeats": len(long),
            }
        else:
            results[sender, receiver] = {"wrong": compare(block, partial(pattern, sender))}
    return results


def _times(mesh: Mesh, act: Callable[[], None], other: int, least: int) -> list[float]:
    often: dict[str, Any] = {"seconds": PAIR_S, "most": ENOUGH, "warm_up": WARM_UP}
    return repeat(mesh.device, act, partial(agree_on_count, other), least=least, **often)


def directions(found: Sequence[Mapping[Pair, dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each direction, from the results of its two ranks."""
    rows: dict[Pair, dict[str, Any]] = {}
    for results in found:
        for pair, part in results.items():
            rows.setdefault(pair, {"from": pair[0], "to": pair[1]}).update(part)
    return [rows[pair] for pair in sorted(rows)]


def _pair(row: Mapping[str, Any]) -> Pair:
    return row["from"], row["to"]


def matrix(rows: list[dict[str, Any]], figure: str, world: int) -> list[list[float | None]]:
    """By sender, then by receiver; None from a rank to itself."""
    results = {_pair(row): row[figure] for row in rows}
    return [[results.get((a, b)) for b in range(world)] for a in range(world)]


def slow_links(
    rows: list[dict[str, Any]], reports: Mapping[int, RankReport], rank_names: RankNames
) -> list[dict[str, Any]]:
    """As `muster check` judges pairs, each direction by itself."""
    speeds = {_pair(row): row["gb_per_s"] for row in rows}
    return [
        {
            "from": a,
            "to": b,
            "words": f"{rank_names.name(a)} → {rank_names.name(b)}: {speeds[a, b]:.3g} GB/s, but {why}",
        }
        for (a, b), why in links.slow_pairs(speeds, reports, rank_names).items()
    ]
