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
from muster.observe.progress import Report, silent
from muster.parallel.mesh import Mesh
from muster.probes.collectives import COLLECTIVES, REFUSALS, Trial, Where, bus_share, refusal

USUAL_MAX = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}  # bytes
COPIES = 8  # of the array that must fit: in, out, the backend's own, and a margin
LARGE = 2**20  # bytes: from here on, bandwidth and no longer latency is what counts

Row = dict[str, Any]


def measure(
    mesh: Mesh,
    only: Sequence[str] = (),
    dtypes: Sequence[str] = ("float32",),
    smallest: int = 1024,
    largest: int | None = None,
    factor: int = 4,
    tell: Report = silent,
) -> Document:
    document = head("collectives", mesh)
    asked, fits = largest or max(USUAL_MAX[mesh.device.type], smallest), largest_size(mesh)
    if smallest > fits:
        raise LaunchError(f"--min {smallest}: only arrays up to {fits} bytes fit into free memory")
    sizes = list(steps(smallest, min(asked, fits), factor))
    rows: list[Row] = []
    left_out: list[Row] = []
    series = [
        (name, kind, where)
        for name in only or COLLECTIVES
        for kind in dtypes
        for where in COLLECTIVES[name].wheres
    ]
    for number, (name, kind, where) in enumerate(series):
        what = {"collective": name, "dtype": kind, "where": where}
        arrays = counts(sizes, getattr(torch, kind).itemsize, mesh.world)
        for done, count in enumerate(arrays):
            tell(number * len(arrays) + done, len(series) * len(arrays))
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
    """One row: timed, then verified on new inputs."""
    attempt = COLLECTIVES[name].prepare(mesh, count, dtype, where)
    if message := _refused(mesh, attempt):
        return {"refused": message}
    size = count * dtype.itemsize
    took = spread_of(mesh, attempt.act, size)
    rate = size / took.median / 1e9
    results = mesh.gather(attempt.verify())
    wrong = [f"rank {rank}: {message}" for rank, message in enumerate(results) if message]
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
    """The backend's error where it lacks the collective, or lacks it for this dtype."""
    message = None
    try:
        attempt.act()
    except REFUSALS as error:
        message = refusal(error)
    return next((text for text in mesh.gather(message) if text), None)


def steps(smallest: int, largest: int, factor: int) -> Iterator[int]:
    size = smallest
    while size <= largest:
        yield size
        size *= factor


def counts(sizes: Sequence[int], itemsize: int, world: int) -> list[int]:
    """In elements, rounded down so that every rank's part has the same size; at least one for each."""
    return list(dict.fromkeys(max(1, size // itemsize // world) * world for size in sizes))


def largest_size(mesh: Mesh) -> int:
    """Bytes of the largest array that fits on every rank."""
    if mesh.device.type == "cuda":
        mine = torch.cuda.mem_get_info(mesh.device)[0] // COPIES
    else:
        free = min(psutil.virtual_memory().available, catalogue.cpu(1).memory_gib * 2**30)
        mine = int(free) // COPIES // mesh.world
    return int(min(mesh.gather(mine)))


def wrong_rows(document: Document) -> list[Row]:
    return [row for row in document["rows"] if row["wrong"]]


def save_for_planner(document: Document, folder: Path) -> str:
    """Save the bus bandwidth of an all-reduce for the planner, in the device's file in `folder`; returns
    what was saved, or why nothing was."""
    rates = [
        row["bus_gb_per_s"]
        for row in document["rows"]
        if (row["collective"], row["where"]) == ("all_reduce", "in")  # as DDP calls it
        and row["dtype"] in ("float32", "bfloat16")
        and row["bytes"] >= LARGE
    ]
    if document["ranks"] == 1:
        return "one rank sends nothing: bus bandwidth is 0, and nothing is saved for the planner"
    if wrong_rows(document) or not rates:
        why = "values are wrong" if rates else "no all_reduce of 1 MiB or more, float32 or bfloat16"
        return f"{why}: nothing is saved for the planner"
    name, hosts = document["device"], len(document["hosts"])
    path, best = catalogue.file_of(name, folder), max(rates)
    if name not in catalogue.names(folder):
        return (
            f"the catalogue has no {document['title']}: run `muster bench device` once, then measure "
            "again, so that the planner knows its links too"
        )
    key = "network_gb_per_s" if hosts > 1 else "link_gb_per_s"
    figure = best / (document["ranks"] / hosts) if hosts > 1 else best
    kept: Document = {"name": name, "measured": {}}
    if path.exists():
        catalogue.own(catalogue.find(name, folder), folder)  # raises where the file is damaged
        kept = json.loads(path.read_text())
    kept["measured"][key] = figure
    write(path, kept)
    each = f" for each of {document['ranks'] // hosts} ranks of a host" if hosts > 1 else ""
    return f"the planner now uses {figure:.3g} GB/s{each}: {key} in {path}"
