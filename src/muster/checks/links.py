"""Step 8: bandwidth between each pair of ranks and of an all-reduce, against the hardware's rates."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from muster.checks.context import RankContext, RankReport, own_address
from muster.checks.findings import Finding, RankNames
from muster.hardware.inventory import Inventory
from muster.parallel.mesh import Mesh
from muster.probes.collectives import bus_share
from muster.probes.pairs import agree_on_count, one_way, round_robin
from muster.probes.repeats import repeat

LEAST_REPEATS, MOST_REPEATS = 4, 24  # the best one counts: loopback and busy hosts vary a lot
ALL_PAIRS_S = 8.0
# NCCL reaches 75-90 % of a link's rate, gloo about half of a fast network's; below a third, something
# other than the protocol limits it.
SHARE = 1 / 3
# Through gloo on one machine a byte is copied about four times, by two processes, and sent through
# loopback TCP. Less than a tenth of plain copying is slow even so.
COPY_SHARE = 1 / 20
OF_THE_MEDIAN = 1 / 2  # a pair this far below the median of its kind is slow
NVLINK_GB_S, BLACKWELL_GB_S = 25.0, 50.0  # one link, one direction
PCIE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # one lane, one direction
NVLINK, PCIE, HOST = "over NVLink", "over PCIe", "through host memory"
# NCCL_P2P_LEVEL: up to which distance GPUs copy to each other directly; farther ones go through host
# memory. Without it, PXB or, on some hosts, more. Its older form is a number.
DISTANCES = {"LOC": 0, "NVL": 1, "PIX": 2, "PXB": 3, "PHB": 4, "NODE": 4, "SYS": 5}
LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS")


def measure(context: RankContext) -> RankReport:
    """GB/s (10⁹ bytes): `pairs` with each rank, `all_reduce` as bus bandwidth."""
    mesh = context.mesh
    block = torch.ones((64 if mesh.device.type == "cuda" else 4) << 18, device=mesh.device)
    seconds, pairs = min(0.4, ALL_PAIRS_S / mesh.world), {}
    for other in round_robin(mesh.rank, mesh.world):
        mesh.barrier()
        if other is not None:
            act = partial(_round_trip, block, mesh.rank, other)
            took = _best(mesh, act, seconds, partial(agree_on_count, other))
            pairs[str(other)] = 2 * block.nbytes / took / 1e9
    mesh.barrier()
    rank_info = context.rank_info
    hardware = link_report(mesh, rank_info.address, context.inventory, rank_info.local_world)
    wide = block.repeat(4)
    mesh.barrier()
    took = _best(mesh, lambda: dist.all_reduce(wide), 0.4, lambda count: dist.broadcast(count, 0))
    bus = bus_share("all_reduce", mesh.world) * wide.nbytes / took / 1e9
    return {"pairs": pairs, "all_reduce": bus, **hardware}


def link_report(mesh: Mesh, address: str, found: Inventory, sharing: int) -> RankReport:
    """What this rank's hardware should give, GB/s: `copy` in memory, `network` of the interface
    towards `address` where `sharing` ranks of this host use it at once, `rates` to each GPU of this
    host, by the `routes` that NCCL takes to them."""
    speed, copy = interface_speed(own_address(address)), _copy_speed()
    routes = gpu_routes(found, mesh.local_rank, os.environ)
    rates = gpu_rates(found, mesh.local_rank, routes, copy)
    return {
        "copy": copy,
        "gpu": mesh.device.type == "cuda",
        "network": speed and speed / sharing,
        "rates": {str(i): rate for i, rate in rates.items()},
        "routes": {str(i): route for i, route in routes.items()},
    }


def _copy_speed() -> float:
    """Of one thread, in a block larger than the caches: what sending a byte to another process costs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    block = torch.ones(64 << 18)  # 64 MiB
    spare, times = torch.empty_like(block), []
    for _ in range(8):
        started = time.perf_counter()
        spare.copy_(block)
        times.append(time.perf_counter() - started)
    torch.set_num_threads(threads)
    return block.nbytes / min(times) / 1e9


def _round_trip(block: Tensor, rank: int, other: int) -> None:
    ack = block[:1].clone()
    for sender in (min(rank, other), max(rank, other)):
        one_way(block, ack, sender, rank + other - sender)


def _best(
    mesh: Mesh,
    act: Callable[[], object],
    seconds: float,
    agree_on_count: Callable[[Tensor], object],
) -> float:
    """The fastest of the calls that fit into `seconds`."""
    least, most = LEAST_REPEATS, MOST_REPEATS
    return min(repeat(mesh.device, act, agree_on_count, seconds=seconds, least=least, most=most))


def interface_speed(address: str) -> float | None:
    """GB/s of the interface with this address; None where the system does not report it."""
    for name, known in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in known):
            state = psutil.net_if_stats().get(name)
            return state.speed / 8e3 if state and state.speed and name != "lo" else None
    return None


def gpu_routes(found: Inventory, index: int, env: Mapping[str, str]) -> dict[int, str]:
    """How NCCL sends from GPU `index` to each other GPU of this host, by its index. One whose distance is
    unknown counts as far."""
    level = env.get("NCCL_P2P_LEVEL", "PXB").strip().upper()
    if level.isdecimal():
        level = LEVELS[min(int(level), len(LEVELS) - 1)]
    reach = 0 if env.get("NCCL_P2P_DISABLE") == "1" else DISTANCES.get(level, DISTANCES["PXB"])
    paths, routes = {frozenset(path[:2]): path[2] for path in found.paths}, {}
    for other in range(len(found.gpus)) if index < len(found.gpus) else ():
        if (min(index, other), max(index, other)) in found.links:
            routes[other] = NVLINK  # held to it even where the user forbids it
        elif other != index:
            distance = DISTANCES.get(paths.get(frozenset((index, other)), "SYS"), DISTANCES["SYS"])
            routes[other] = PCIE if distance <= reach else HOST
    return routes


def gpu_rates(
    found: Inventory, index: int, routes: Mapping[int, str], copy: float
) -> dict[int, float]:
    """What GPU `index` should reach to each other GPU of this host, by its index, one way. Through host
    memory it is no less than one thread's `copy`."""
    if index >= len(found.gpus):
        return {}
    mine, rates = found.gpus[index], {}
    for other, route in routes.items():
        pcie = [gpu.pcie for gpu in (mine, found.gpus[other])]
        if route == NVLINK:
            one = BLACKWELL_GB_S if any(f"B{n}00" in mine.name for n in (1, 2, 3)) else NVLINK_GB_S
            peers = 1 if found.nvswitch else sum(index in pair for pair in found.links)
            rates[other] = one * max(1, mine.nvlinks // peers)  # split over the peers
        elif all(pcie):
            speeds = [PCIE_GB_S.get(p.best_generation, 0.0) * p.width for p in pcie if p]
            rates[other] = min(speeds if route == PCIE else [*speeds, copy])
    return rates


def judge(reports: Mapping[int, RankReport], rank_names: RankNames) -> list[Finding]:
    speeds = {
        (a, int(b)): speed
        for a in sorted(reports)
        for b, speed in reports[a]["pairs"].items()
        if a < int(b)
    }
    if not speeds:
        return [Finding("links", "ok", "one rank: no links to measure")]
    bus = min(report["all_reduce"] for report in reports.values())
    figures = {"slowest_pair_gb_s": min(speeds.values()), "all_reduce_gb_s": bus}
    floors = {pair: _floor(pair, reports, rank_names) for pair in speeds}
    slow = slow_pairs(speeds, reports, rank_names)
    found = [_slow_finding(list(slow), speeds, reports, rank_names)] if slow else []
    known = [floor for floor in floors.values() if floor]
    if known and bus < min(known) / 2:
        found.append(_slow_all_reduce(bus, min(known), figures))
    if found:
        return found
    low, high = min(speeds.values()), max(speeds.values())
    pairs = f"{low:.3g}" if len(speeds) == 1 else f"{low:.3g} to {high:.3g}"
    message = f"pairs {pairs} GB/s, all-reduce {bus:.3g} GB/s; {_hardware(reports, rank_names)}"
    return [Finding("links", "ok", message, figures=figures)]


def slow_pairs(
    speeds: Mapping[tuple[int, int], float],
    reports: Mapping[int, RankReport],
    rank_names: RankNames,
) -> dict[tuple[int, int], str]:
    """Pairs well below their hardware's rate, or below the median of their kind; and why they count as
    slow. `reports` are those of `link_report`."""
    medians, found = _medians(speeds, reports, rank_names), {}
    for pair, speed in speeds.items():
        kind = _kind(pair, reports, rank_names)
        rate, usual = _rate(pair, reports, rank_names), medians.get(kind, 0.0)
        floor = _floor(pair, reports, rank_names) or 0.0
        if speed < floor:
            found[pair] = f"the hardware has {rate:.3g} GB/s and should give {floor:.3g}"
        elif speed < usual * OF_THE_MEDIAN:
            found[pair] = f"the median {kind} is {usual:.3g} GB/s"
    return found


def _near(pair: tuple[int, int], rank_names: RankNames) -> bool:
    return rank_names.host(pair[0]) == rank_names.host(pair[1])


def _kind(pair: tuple[int, int], reports: Mapping[int, RankReport], rank_names: RankNames) -> str:
    """Pairs of one kind should be equally fast."""
    if not _near(pair, rank_names):
        return "between hosts"
    other = str(rank_names.registered[pair[1]]["local_rank"])
    gpu: bool = reports[pair[0]]["gpu"]
    route: str = reports[pair[0]]["routes"].get(other, "") if gpu else ""
    return f"within a host {route}".strip()


def _rate(
    pair: tuple[int, int], reports: Mapping[int, RankReport], rank_names: RankNames
) -> float | None:
    """What the hardware should give this pair, GB/s; None where it is unknown."""
    both = [reports[rank] for rank in pair]
    if not _near(pair, rank_names):
        speeds = [report["network"] for report in both]
        return None if None in speeds else min(speeds)
    if both[0]["gpu"]:
        return both[0]["rates"].get(str(rank_names.registered[pair[1]]["local_rank"]))
    return min(report["copy"] for report in both)


def _floor(
    pair: tuple[int, int], reports: Mapping[int, RankReport], rank_names: RankNames
) -> float | None:
    rate = _rate(pair, reports, rank_names)
    by_copying = _near(pair, rank_names) and not reports[pair[0]]["gpu"]
    return rate and rate * (COPY_SHARE if by_copying else SHARE)


def _medians(
    speeds: Mapping[tuple[int, int], float],
    reports: Mapping[int, RankReport],
    rank_names: RankNames,
) -> dict[str, float]:
    """Of the pairs of each kind; two pairs or fewer have no usual speed, even where both directions of
    each are given."""
    kinds: dict[str, dict[tuple[int, int], float]] = {}
    for pair, speed in speeds.items():
        kinds.setdefault(_kind(pair, reports, rank_names), {})[pair] = speed
    return {
        kind: statistics.median(found.values())
        for kind, found in kinds.items()
        if len({frozenset(pair) for pair in found}) > 2
    }


def _hardware(reports: Mapping[int, RankReport], rank_names: RankNames) -> str:
    first, last = min(reports), max(reports)
    rate = _rate((first, last), reports, rank_names)
    if not _near((first, last), rank_names):
        if rate is None:
            return "the network's rate is unknown"
        return f"the network's rate is {rate:.3g} GB/s for each rank of a host"
    if reports[first]["gpu"]:
        return f"the link's rate is {rate:.3g} GB/s" if rate else "the links' rate is unknown"
    return f"copying in memory {rate:.3g} GB/s"


def _slow_finding(
    slow: list[tuple[int, int]],
    speeds: Mapping[tuple[int, int], float],
    reports: Mapping[int, RankReport],
    rank_names: RankNames,
) -> Finding:
    shown = []
    for a, b in slow[:6]:
        rate = _rate((a, b), reports, rank_names)
        of = f" where the hardware has {rate:.3g}" if rate else ""
        shown.append(f"{rank_names.name(a)} ↔ {rank_names.name(b)}: {speeds[a, b]:.3g} GB/s{of}")
    more = f"; and {len(slow) - 6} more" if len(slow) > 6 else ""
    ranks = sorted({rank for pair in slow for rank in pair})
    return Finding(
        "links",
        "warn",
        "slow pairs: " + "; ".join(shown) + more,
        cause="traffic takes a slower path than it should (PCIe or host memory instead of NVLink, the "
        "wrong network interface), or shares it with other jobs",
        cure="see `nvidia-smi topo -m`; name the fast interface in NCCL_SOCKET_IFNAME and "
        "GLOO_SOCKET_IFNAME (`muster check --environment` proposes one); on CPUs end what competes",
        ranks=tuple(ranks),
        hosts=rank_names.hosts_of(ranks),
        figures={f"{a}-{b}_gb_s": speeds[a, b] for a, b in slow},
    )


def _slow_all_reduce(bus: float, floor: float, figures: dict[str, float]) -> Finding:
    return Finding(
        "links",
        "warn",
        f"all-reduce runs at {bus:.3g} GB/s though each pair should reach at least {floor:.3g}",
        cause="all ranks at once share one path, or NCCL chose a slow one",
        cure="run with NCCL_DEBUG=INFO and see which transport it names; see `nvidia-smi topo -m`",
        figures=figures,
    )
