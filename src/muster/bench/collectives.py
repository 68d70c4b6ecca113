"""`muster bench collectives`: time, algorithm and bus bandwidth of each collective, over sizes.

The definitions are those of nccl-tests: the size is the whole array's, algorithm bandwidth is size ÷
time, bus bandwidth is that × `bus_share`. GB = 10⁹ bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from muster.bench.files import Document, write
from muster.bench.results import head
from muster.bench.timing import ENOUGH, LEAST, SMALL, WARM_UP, spread_of
from muster.errors import LaunchError
from muster.hardware import catalogue
from muster.parallel.collectives import COLLECTIVES, REFUSALS, Trial, Where, bus_share, refusal
from muster.parallel.mesh import Mesh

USUAL_MAX = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}  # bytes
COPIES = 8  # of the array that must fit: in, out, the backend's own, and room for others
LARGE = 2**20  # bytes: from here on, bandwidth and no longer latency is what counts

Row = dict[str, Any]


def measure(
    mesh: Mesh,
    only: Sequence[str] = (),
    dtypes: Sequence[str] = ("float32",),
    smallest: int = 1024,
    largest: int | None = None,
    factor: int = 4,
) -> Document:
    document = head("collectives", mesh)
    asked, fits = largest or max(USUAL_MAX[mesh.device.type], smallest), room(mesh)
    if smallest > fits:
        raise LaunchError(f"--min {smallest}: only arrays up to {fits} bytes fit into free memory")
    sizes = list(steps(smallest, min(asked, fits), factor))
    rows: list[Row] = []
    left_out: list[Row] = []
    for name in only or COLLECTIVES:
        for kind in dtypes:
            for where in COLLECTIVES[name].wheres:
                what = {"collective": name, "dtype": kind, "where": where}
                for count in counts(sizes, getattr(torch, kind).itemsize, mesh.world):
                    row = what | trial(mesh, name, count, getattr(torch, kind), where)
                    if "refused" in row:
                        left_out.append(row)
                        break
                    rows.append(row)
    if not rows:
        why = left_out[0]["refused"] if left_out else "no size fits"
        raise LaunchError(f"nothing could be measured: {why}")
    return document | {
        "keys": ["collective", "dtype", "where", "bytes"],
        "figure": "time_us",
        "better": "lower",
        "method": {
            "statistic": "median of the slowest rank's time of each repeat",
            "warm_up_calls": WARM_UP,
            "repeats": f"{ENOUGH} up to {SMALL} bytes, then {LEAST} to {ENOUGH}",
        },
        "largest_that_fits": fits if asked > fits else None,
        "left_out": left_out,
        "rows": rows,
    }


def trial(mesh: Mesh, name: str, count: int, dtype: torch.dtype, where: Where) -> Row:
    """One row: timed, then proven on fresh numbers."""
    attempt = COLLECTIVES[name].prepare(mesh, count, dtype, where)
    if words := _refused(mesh, attempt):
        return {"refused": words}
    size = count * dtype.itemsize
    took = spread_of(mesh, attempt.act, size)
    rate = size / took.median / 1e9
    said = mesh.gather(attempt.prove())
    wrong = [f"rank {rank}: {words}" for rank, words in enumerate(said) if words]
    return {
        "bytes": size,
        "time_us": took.median * 1e6,
        "p99_us": took.p99 * 1e6,
        "algorithm_gb_per_s": rate,
        "bus_gb_per_s": rate * bus_share(name, mesh.world),
        "repeats": took.repeats,
        "wrong": wrong,
    }


def _refused(mesh: Mesh, attempt: Trial) -> str | None:
    """What the backend says where it has no such collective, or not for these numbers."""
    words = None
    try:
        attempt.act()
    except REFUSALS as error:
        words = refusal(error)
    return next((said for said in mesh.gather(words) if said), None)


def steps(smallest: int, largest: int, factor: int) -> Iterator[int]:
    size = smallest
    while size <= largest:
        yield size
        size *= factor


def counts(sizes: Sequence[int], itemsize: int, world: int) -> list[int]:
    """In numbers, rounded down so that every rank's part is alike; at least one for each."""
    return list(dict.fromkeys(max(1, size // itemsize // world) * world for size in sizes))


def room(mesh: Mesh) -> int:
    """Bytes of the largest array that fits on every rank."""
    if mesh.device.type == "cuda":
        mine = torch.cuda.mem_get_info(mesh.device)[0] // COPIES
    else:
        free = min(psutil.virtual_memory().available, catalogue.cpu(1).memory_gib * 2**30)
        mine = int(free) // COPIES // mesh.world
    return int(min(mesh.gather(mine)))


def wrong_rows(document: Document) -> list[Row]:
    return [row for row in document["rows"] if row["wrong"]]


def learn(document: Document, folder: Path) -> str:
    """Tell the planner what an all-reduce reaches, in the device's file in `folder`; returns in words
    what was done, or why nothing was."""
    rates = [
        row["bus_gb_per_s"]
        for row in document["rows"]
        if (row["collective"], row["where"]) == ("all_reduce", "in")  # as gradients travel
        and row["dtype"] in ("float32", "bfloat16")
        and row["bytes"] >= LARGE
    ]
    if document["ranks"] == 1:
        return "one rank sends nothing: bus bandwidth is 0, and the planner learns nothing"
    if wrong_rows(document) or not rates:
        why = "values are wrong" if rates else "no all_reduce of 1 MiB or more, float32 or bfloat16"
        return f"{why}: the planner learns nothing"
    name, hosts = document["device"], len(document["hosts"])
    path, best = catalogue.file_of(name, folder), max(rates)
    if name not in catalogue.names(folder):
        return (
            f"the catalogue has no {document['title']}: run `muster bench device` once, then measure "
            "again, and the planner knows its links too"
        )
    key = "network_gb_per_s" if hosts > 1 else "link_gb_per_s"
    figure = best / (document["ranks"] / hosts) if hosts > 1 else best
    kept: Document = {"name": name, "measured": {}}
    if path.exists():
        catalogue.own(catalogue.find(name, folder), folder)  # a file that is damaged says so
        kept = json.loads(path.read_text())
    kept["measured"][key] = figure
    write(path, kept)
    each = f" for each of {document['ranks'] // hosts} ranks of a host" if hosts > 1 else ""
    return f"the planner now counts on {figure:.3g} GB/s{each}: {key} in {path}"
