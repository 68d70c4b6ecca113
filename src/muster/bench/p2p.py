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
from muster.check import links
from muster.check.findings import Roll
from muster.check.seat import Account, own_address
from muster.errors import LaunchError
from muster.hardware import inventory
from muster.launch import cluster
from muster.parallel.collectives import compare, pattern, write
from muster.parallel.mesh import Mesh
from muster.parallel.pairs import ONE_AT_A_TIME, alone, one_way, opponents, tell
from muster.parallel.repeats import repeat

BLOCK = {"cuda": 64 * 2**20, "cpu": 4 * 2**20}  # bytes
PAIR_S = 0.2  # of one direction, roughly

Pair = tuple[int, int]  # from, to


def measure(mesh: Mesh, size: int | None = None) -> Document:
    if mesh.world == 1:
        raise LaunchError("one rank has nobody to talk to; start at least two (--gpus 2)")
    bytes_sent = size or BLOCK[mesh.device.type]
    meetings = alone if mesh.world <= ONE_AT_A_TIME else opponents
    document, seat = head("p2p", mesh), sign_in(mesh, together=meetings is opponents)
    mine: dict[Pair, dict[str, Any]] = {}
    for other in meetings(mesh.rank, mesh.world):
        mesh.barrier()
        if other is not None:
            mine |= meet(mesh, other, bytes_sent)
    mesh.barrier()
    rows = directions(mesh.gather(mine))
    seats = dict(enumerate(mesh.gather(seat)))
    roll = Roll(seats)
    return document | {
        "keys": ["from", "to"],
        "figure": "gb_per_s",
        "better": "higher",
        "method": {
            "statistic": "median",
            "bytes": bytes_sent,
            "warm_up_calls": WARM_UP,
            "pairs_at_once": 1 if meetings is alone else mesh.world // 2,
        },
        "block_bytes": bytes_sent,
        "where": [roll.host(rank) for rank in range(mesh.world)],
        "rows": rows,
        "gb_per_s": matrix(rows, "gb_per_s", mesh.world),
        "latency_us": matrix(rows, "latency_us", mesh.world),
        "slow": slow_links(rows, seats, roll),
    }


def sign_in(mesh: Mesh, together: bool) -> Account:
    """Where this rank is, and what its hardware should give, to one pair or to all `together`."""
    place = cluster.detect(os.environ)
    sharing = place.local_world if together else 1
    return links.describe(mesh, place.address, inventory.detect(), sharing) | {
        "host": os.uname().nodename,
        "net": os.stat("/proc/self/ns/net").st_ino,
        "address": own_address(place.address),
        "local_rank": mesh.local_rank,
    }


def meet(mesh: Mesh, other: int, size: int) -> dict[Pair, dict[str, Any]]:
    """Both directions between this rank and `other`: the sender's times, and what the receiver finds
    wrong in the block."""
    block = torch.empty(max(1, size // 4), device=mesh.device)
    word = torch.ones(1, device=mesh.device)
    found: dict[Pair, dict[str, Any]] = {}
    for sender, receiver in sorted([(mesh.rank, other), (other, mesh.rank)]):
        write(block, partial(pattern, mesh.rank))
        long = _times(mesh, partial(one_way, block, word, sender, receiver), other, LEAST)
        quick = _times(mesh, partial(one_way, word, word, sender, receiver), other, ENOUGH)
        if mesh.rank == sender:
            found[sender, receiver] = {
                "gb_per_s": block.nbytes / statistics.median(long) / 1e9,
                "latency_us": statistics.median(quick) / 2 * 1e6,  # half of there and back
                "repeats": len(long),
            }
        else:
            found[sender, receiver] = {"wrong": compare(block, partial(pattern, sender))}
    return found


def _times(mesh: Mesh, act: Callable[[], None], other: int, least: int) -> list[float]:
    often: dict[str, Any] = {"seconds": PAIR_S, "most": ENOUGH, "warm_up": WARM_UP}
    return repeat(mesh.device, act, partial(tell, other), least=least, **often)


def directions(said: Sequence[Mapping[Pair, dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each direction, from what its two ranks say of it."""
    rows: dict[Pair, dict[str, Any]] = {}
    for found in said:
        for pair, part in found.items():
            rows.setdefault(pair, {"from": pair[0], "to": pair[1]}).update(part)
    return [rows[pair] for pair in sorted(rows)]


def _pair(row: Mapping[str, Any]) -> Pair:
    return row["from"], row["to"]


def matrix(rows: list[dict[str, Any]], figure: str, world: int) -> list[list[float | None]]:
    """By sender, then by receiver; None from a rank to itself."""
    found = {_pair(row): row[figure] for row in rows}
    return [[found.get((a, b)) for b in range(world)] for a in range(world)]


def slow_links(
    rows: list[dict[str, Any]], accounts: Mapping[int, Account], roll: Roll
) -> list[dict[str, Any]]:
    """As `muster check` judges pairs, each direction by itself."""
    speeds = {_pair(row): row["gb_per_s"] for row in rows}
    return [
        {
            "from": a,
            "to": b,
            "words": f"{roll.name(a)} → {roll.name(b)}: {speeds[a, b]:.3g} GB/s, but {why}",
        }
        for (a, b), why in links.slow_pairs(speeds, accounts, roll).items()
    ]
