"""Step 3: one rank per device, each bound to its own, and the rank mapping."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping

import torch

from muster.checks.context import RankContext, RankReport
from muster.checks.findings import Finding, RankNames
from muster.hardware import inventory, rehearsal


def measure(context: RankContext) -> RankReport:
    """Binds the device. `contexts`: processes on each visible GPU, once every rank is bound."""
    before = context.inventory.gpus
    device = context.device
    report: RankReport = {
        "device": str(device),
        "uuid": None,
        "bound": True,
        "cores": sorted(os.sched_getaffinity(0)),
        "reachable": reachable_cores(),
        "contexts": {},
    }
    if device.type != "cuda":
        return report
    torch.zeros(1, device=device)  # creates the CUDA context
    report["uuid"] = str(torch.cuda.get_device_properties(device).uuid)
    report["name"] = torch.cuda.get_device_name(device)
    report["bound"] = torch.cuda.current_device() == device.index
    context.barrier("bound")
    strangers = {gpu.uuid: len(gpu.processes or ()) for gpu in before}
    for gpu in inventory.detect().gpus:
        if gpu.processes is not None:
            report["contexts"][gpu.uuid] = len(gpu.processes) - strangers.get(gpu.uuid, 0)
    return report


def reachable_cores() -> list[int]:
    """Cores that this process could be given: the kernel reduces a request for all of them to those.

    Requested in a thread, since affinity is per thread.
    """
    found: list[int] = []

    def request_all() -> None:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        found.extend(sorted(os.sched_getaffinity(0)))

    thread = threading.Thread(target=request_all)
    thread.start()
    thread.join()
    return found or sorted(os.sched_getaffinity(0))


def judge(reports: Mapping[int, RankReport], rank_names: RankNames) -> list[Finding]:
    found = [
        *_mapping(rank_names),
        *_shared_gpus(reports, rank_names),
        *_shared_cores(reports, rank_names),
    ]
    found += [*_unbound(reports, rank_names), *_stray_contexts(reports, rank_names)]
    return found or [Finding("ranks", "ok", _summary(reports, rank_names))]


def _summary(reports: Mapping[int, RankReport], rank_names: RankNames) -> str:
    lines = []
    for rank in sorted(reports)[:16]:
        report = reports[rank]
        where = report["device"] if report["uuid"] else f"cores {_cores(report['cores'])}"
        what = f"{report['name']}, " if report["uuid"] else ""
        lines.append(f"Rank: {rank}/{len(reports)}, {what}{where} on {rank_names.host(rank)}")
    if len(reports) > 16:
        lines.append(f"and {len(reports) - 16} more, each on its own device")
    return "\n".join(lines)


def _cores(cores: list[int]) -> str:
    return ",".join(map(str, cores)) if len(cores) < 5 else f"{cores[0]}…{cores[-1]} ({len(cores)})"


def _mapping(rank_names: RankNames) -> list[Finding]:
    """Local ranks count 0 … n-1 on each host, and global ranks follow host by host. The nodes of a
    rehearsal may be one host."""
    found: list[Finding] = []
    if rehearsal.active():
        return found
    for host, ranks in rank_names.hosts().items():
        locals_ = [rank_names.registered[rank]["local_rank"] for rank in ranks]
        sizes = sorted({rank_names.registered[rank]["local_world"] for rank in ranks})
        pairs = zip(ranks, locals_, strict=True)
        shown = ", ".join(f"rank {rank} is local rank {local}" for rank, local in pairs)
        message = ""
        if sorted(locals_) != list(range(len(ranks))):
            message = f"the local ranks are not 0 to {len(ranks) - 1}: {shown}"
        elif sizes != [len(ranks)]:
            message = f"{len(ranks)} ranks joined, but LOCAL_WORLD_SIZE is {sizes}"
        elif ranks != list(range(ranks[0], ranks[0] + len(ranks))) or locals_ != sorted(locals_):
            message = f"ranks are not consecutive: {shown}"
        if message:
            found.append(
                Finding(
                    "ranks",
                    "fail",
                    f"wrong rank mapping on {host}: {message}",
                    cause="the launcher assigns ranks to hosts in turn, or RANK and LOCAL_RANK were "
                    "set by hand and are inconsistent; tensor-parallel groups would span hosts, ranks share devices",
                    cure="let torchrun or muster number them; with srun add --distribution=block, with "
                    "mpirun --map-by slot",
                    ranks=tuple(ranks),
                    hosts=(host,),
                )
            )
    return found


def _shared_gpus(reports: Mapping[int, RankReport], rank_names: RankNames) -> list[Finding]:
    owners: dict[str, list[int]] = {}
    for rank in sorted(reports):
        if uuid := reports[rank]["uuid"]:
            owners.setdefault(uuid, []).append(rank)
    return [
        Finding(
            "ranks",
            "fail",
            f"ranks {', '.join(map(str, ranks))} share one GPU of {rank_names.host(ranks[0])} ({uuid})",
            cause="more ranks than GPUs, or CUDA_VISIBLE_DEVICES or LOCAL_RANK gives them the same one",
            cure="start as many ranks as there are GPUs, give every rank the same mask, and let the "
            f"launcher set LOCAL_RANK; or let ranks share GPUs with {rehearsal.FLAG}",
            ranks=tuple(ranks),
            hosts=rank_names.hosts_of(ranks),
        )
        for uuid, ranks in owners.items()
        if len(ranks) > 1 and not rehearsal.active()
    ]


def _shared_cores(reports: Mapping[int, RankReport], rank_names: RankNames) -> list[Finding]:
    """CPU ranks that were pinned to the same cores of a machine while others are free."""
    machines: dict[str, list[int]] = {}
    for rank in sorted(reports):
        if not reports[rank]["uuid"]:
            machines.setdefault(rank_names.registered[rank]["boot"], []).append(rank)
    found = []
    for ranks in machines.values():
        taken = set().union(*(reports[rank]["cores"] for rank in ranks))
        free = set().union(*(reports[rank]["reachable"] for rank in ranks)) - taken
        for one, other in itertools.combinations(ranks, 2):
            shared = sorted(set(reports[one]["cores"]) & set(reports[other]["cores"]))
            if shared and free:
                found.append(
                    Finding(
                        "ranks",
                        "fail",
                        f"ranks {one} and {other} share core {_cores(shared)} of {rank_names.host(one)} "
                        f"while core {_cores(sorted(free))} is free",
                        cause="taskset, numactl or the scheduler's binding pins them to the same cores",
                        cure="pin every rank to its own cores, or none of them: muster then does it",
                        ranks=(one, other),
                        hosts=rank_names.hosts_of([one, other]),
                    )
                )
    return found[:8]


def _unbound(reports: Mapping[int, RankReport], rank_names: RankNames) -> list[Finding]:
    loose = [rank for rank in sorted(reports) if not reports[rank]["bound"]]
    if not loose:
        return []
    return [
        Finding(
            "ranks",
            "fail",
            f"{rank_names.names(loose)}: torch's current device is not the one the rank is bound to",
            cause="something called set_device after muster had bound it",
            cure="look for set_device in sitecustomize or plugins; start from a clean environment",
            ranks=tuple(loose),
            hosts=rank_names.hosts_of(loose),
        )
    ]


def _stray_contexts(reports: Mapping[int, RankReport], rank_names: RankNames) -> list[Finding]:
    """More processes on a GPU than ranks bound to it: a common reason for a full GPU 0."""
    owned = [report["uuid"] for report in reports.values() if report["uuid"]]
    most: dict[str, tuple[int, int]] = {}
    for rank, report in reports.items():
        for uuid, count in report["contexts"].items():
            most[uuid] = max(most.get(uuid, (0, rank)), (count, rank))
    return [
        Finding(
            "ranks",
            "warn",
            f"{count} contexts on GPU {uuid} of {rank_names.host(rank)}, where {_own(owned, uuid)} rank(s) "
            "should have one",
            cause="ranks used that GPU before they were bound to their own, or another job has just started "
            "there",
            cure="set the device before the first CUDA call; see `nvidia-smi` for whose they are",
            ranks=(rank,),
            hosts=rank_names.hosts_of([rank]),
        )
        for uuid, (count, rank) in most.items()
        if count > _own(owned, uuid)
    ]


def _own(owned: list[str], uuid: str) -> int:
    return sum(uuid.removeprefix("GPU-") == one.removeprefix("GPU-") for one in owned)
