"""Step 3: one rank per device, each bound to its own, and numbered as training expects."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping

import torch

from muster.check.findings import Finding, Roll
from muster.check.seat import Account, Seat
from muster.hardware import inventory


def measure(seat: Seat) -> Account:
    """Binds the device. `contexts`: processes on each visible GPU, once every rank is on its own."""
    before = seat.inventory.gpus
    device = seat.device
    account: Account = {
        "device": str(device),
        "uuid": None,
        "bound": True,
        "cores": sorted(os.sched_getaffinity(0)),
        "reachable": reachable_cores(),
        "contexts": {},
    }
    if device.type != "cuda":
        return account
    torch.zeros(1, device=device)  # makes the context
    account["uuid"] = str(torch.cuda.get_device_properties(device).uuid)
    account["name"] = torch.cuda.get_device_name(device)
    account["bound"] = torch.cuda.current_device() == device.index
    seat.meet("bound")
    strangers = {gpu.uuid: len(gpu.processes or ()) for gpu in before}
    for gpu in inventory.detect().gpus:
        if gpu.processes is not None:
            account["contexts"][gpu.uuid] = len(gpu.processes) - strangers.get(gpu.uuid, 0)
    return account


def reachable_cores() -> list[int]:
    """Cores that this process could be given: the kernel cuts a wish for all of them down to those.

    A thread makes the wish, since affinity is each thread's own.
    """
    found: list[int] = []

    def wish() -> None:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        found.extend(sorted(os.sched_getaffinity(0)))

    thread = threading.Thread(target=wish)
    thread.start()
    thread.join()
    return found or sorted(os.sched_getaffinity(0))


def judge(accounts: Mapping[int, Account], roll: Roll) -> list[Finding]:
    found = [*_mapping(roll), *_shared_gpus(accounts, roll), *_shared_cores(accounts, roll)]
    found += [*_unbound(accounts, roll), *_stray_contexts(accounts, roll)]
    return found or [Finding("ranks", "ok", _words(accounts, roll))]


def _words(accounts: Mapping[int, Account], roll: Roll) -> str:
    lines = []
    for rank in sorted(accounts)[:16]:
        said = accounts[rank]
        where = said["device"] if said["uuid"] else f"cores {_cores(said['cores'])}"
        what = f"{said['name']}, " if said["uuid"] else ""
        lines.append(f"Rank: {rank}/{len(accounts)}, {what}{where} on {roll.host(rank)}")
    if len(accounts) > 16:
        lines.append(f"and {len(accounts) - 16} more, each on a device of its own")
    return "\n".join(lines)


def _cores(cores: list[int]) -> str:
    return ",".join(map(str, cores)) if len(cores) < 5 else f"{cores[0]}…{cores[-1]} ({len(cores)})"


def _mapping(roll: Roll) -> list[Finding]:
    """Local ranks count 0 … n-1 on each host, and global ranks follow host by host."""
    found = []
    for host, ranks in roll.hosts().items():
        locals_ = [roll.arrived[rank]["local_rank"] for rank in ranks]
        sizes = sorted({roll.arrived[rank]["local_world"] for rank in ranks})
        pairs = zip(ranks, locals_, strict=True)
        shown = ", ".join(f"rank {rank} is local rank {local}" for rank, local in pairs)
        words = ""
        if sorted(locals_) != list(range(len(ranks))):
            words = f"the local ranks are not 0 to {len(ranks) - 1}: {shown}"
        elif sizes != [len(ranks)]:
            words = f"{len(ranks)} ranks arrived, though they were told of {sizes}"
        elif ranks != list(range(ranks[0], ranks[0] + len(ranks))) or locals_ != sorted(locals_):
            words = f"ranks do not follow each other: {shown}"
        if words:
            found.append(
                Finding(
                    "ranks",
                    "fail",
                    f"wrong rank mapping on {host}: {words}",
                    cause="the launcher deals ranks out in turn over hosts, or RANK and LOCAL_RANK were "
                    "set by hand and do not fit; tensor groups would span hosts, devices be shared",
                    cure="let torchrun or muster number them; with srun add --distribution=block, with "
                    "mpirun --map-by slot",
                    ranks=tuple(ranks),
                    hosts=(host,),
                )
            )
    return found


def _shared_gpus(accounts: Mapping[int, Account], roll: Roll) -> list[Finding]:
    owners: dict[str, list[int]] = {}
    for rank in sorted(accounts):
        if uuid := accounts[rank]["uuid"]:
            owners.setdefault(uuid, []).append(rank)
    return [
        Finding(
            "ranks",
            "fail",
            f"ranks {', '.join(map(str, ranks))} share one GPU of {roll.host(ranks[0])} ({uuid})",
            cause="more ranks than GPUs, or CUDA_VISIBLE_DEVICES or LOCAL_RANK sends them to the same one",
            cure="start as many ranks as there are GPUs, give every rank the same mask, and let the "
            "launcher set LOCAL_RANK",
            ranks=tuple(ranks),
            hosts=roll.hosts_of(ranks),
        )
        for uuid, ranks in owners.items()
        if len(ranks) > 1
    ]


def _shared_cores(accounts: Mapping[int, Account], roll: Roll) -> list[Finding]:
    """CPU ranks that were pinned to the same cores of a machine while others are free."""
    machines: dict[str, list[int]] = {}
    for rank in sorted(accounts):
        if not accounts[rank]["uuid"]:
            machines.setdefault(roll.arrived[rank]["boot"], []).append(rank)
    found = []
    for ranks in machines.values():
        taken = set().union(*(accounts[rank]["cores"] for rank in ranks))
        free = set().union(*(accounts[rank]["reachable"] for rank in ranks)) - taken
        for one, other in itertools.combinations(ranks, 2):
            shared = sorted(set(accounts[one]["cores"]) & set(accounts[other]["cores"]))
            if shared and free:
                found.append(
                    Finding(
                        "ranks",
                        "fail",
                        f"ranks {one} and {other} share core {_cores(shared)} of {roll.host(one)} "
                        f"while core {_cores(sorted(free))} is free",
                        cause="taskset, numactl or the scheduler's binding pins them to the same cores",
                        cure="pin every rank to cores of its own, or none of them: muster then does it",
                        ranks=(one, other),
                        hosts=roll.hosts_of([one, other]),
                    )
                )
    return found[:8]


def _unbound(accounts: Mapping[int, Account], roll: Roll) -> list[Finding]:
    loose = [rank for rank in sorted(accounts) if not accounts[rank]["bound"]]
    if not loose:
        return []
    return [
        Finding(
            "ranks",
            "fail",
            f"{roll.names(loose)}: torch's current device is not the rank's own",
            cause="something chose another device after muster had bound it",
            cure="look for set_device in sitecustomize or plug-ins; start from a clean environment",
            ranks=tuple(loose),
            hosts=roll.hosts_of(loose),
        )
    ]


def _stray_contexts(accounts: Mapping[int, Account], roll: Roll) -> list[Finding]:
    """More processes on a GPU than ranks that own it: the classic way for GPU 0 to fill up."""
    owned = [said["uuid"] for said in accounts.values() if said["uuid"]]
    most: dict[str, tuple[int, int]] = {}
    for rank, said in accounts.items():
        for uuid, count in said["contexts"].items():
            most[uuid] = max(most.get(uuid, (0, rank)), (count, rank))
    return [
        Finding(
            "ranks",
            "warn",
            f"{count} contexts on GPU {uuid} of {roll.host(rank)}, where {_own(owned, uuid)} rank(s) "
            "should have one",
            cause="ranks touched that GPU before they were bound to their own, or a job started there "
            "just now",
            cure="set the device before the first CUDA call; see `nvidia-smi` for whose they are",
            ranks=(rank,),
            hosts=roll.hosts_of([rank]),
        )
        for uuid, (count, rank) in most.items()
        if count > _own(owned, uuid)
    ]


def _own(owned: list[str], uuid: str) -> int:
    return sum(uuid.removeprefix("GPU-") == one.removeprefix("GPU-") for one in owned)
