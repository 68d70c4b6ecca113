"""Step 2: devices enough for the ranks, what masks hide, and who else is on them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import psutil

from muster.check.findings import Finding, Roll, Status
from muster.check.seat import Account, Seat
from muster.hardware.inventory import Inventory

SAMPLE_S = 0.3
BUSY = 0.5  # of a core: another program, not the system's own bookkeeping
FREE_SHARE = 0.9  # of a GPU's memory; the driver itself takes a few percent


def measure(seat: Seat) -> Account:
    """One rank of each host speaks for it; ranks hold no GPU yet, so whoever computes is a stranger."""
    if seat.place.local_rank:
        return {}
    found = seat.inventory
    return describe(found) | {"competitors": [] if found.gpus else competitors()}


def describe(found: Inventory) -> Account:
    return {
        "words": found.describe(),
        "gpus": [
            {
                "index": gpu.index,
                "memory_gib": gpu.memory_gib,
                "free_gib": gpu.free_gib,
                "ecc_errors": gpu.ecc_errors,
                "xids": list(gpu.xids or ()),
                "pids": [process.pid for process in gpu.processes or ()],
            }
            for gpu in found.gpus
        ],
        "hidden": found.describe_hidden(),
        "hidden_gpus": len(found.hidden),
        "cpus": found.cpus,
        "cpu_words": found.cpu.describe() if found.cpu else f"{found.cpus} CPU cores",
    }


def competitors() -> list[str]:
    """Processes that keep a core busy while every rank waits."""
    before = _times()
    time.sleep(SAMPLE_S)
    found = []
    for process, spent in _times().items():
        share = (spent - before.get(process, spent)) / SAMPLE_S
        if share > BUSY:
            found.append((share, process))
    found.sort(key=lambda pair: -pair[0])
    return [f"{name(process.pid)}, {share:.0%} of a core" for share, process in found]


def _times() -> dict[psutil.Process, float]:
    found = {}
    for process in psutil.process_iter(["cpu_times"]):
        if spent := process.info["cpu_times"]:
            found[process] = spent.user + spent.system
    return found


def name(pid: int) -> str:
    """A container may not see the process that the driver names."""
    try:
        process = psutil.Process(pid)
        return f"{process.name()} (pid {pid}, user {process.username()})"
    except (psutil.Error, KeyError):
        return f"pid {pid}"


def judge(accounts: Mapping[int, Account], roll: Roll) -> list[Finding]:
    found: list[Finding] = []
    for host, ranks in roll.hosts().items():
        said = next((accounts[rank] for rank in ranks if accounts[rank]), None)
        if said is None:
            continue  # no local rank 0: the next step says so
        found += _gpu_host(host, ranks, said) if said["gpus"] else _cpu_host(host, ranks, said)
    return found


def _gpu_host(host: str, ranks: list[int], said: Account) -> list[Finding]:
    here: dict[str, Any] = {"ranks": tuple(ranks), "hosts": (host,)}
    gpus, found = said["gpus"], []
    hidden = f"; {', '.join(said['hidden'])}" if said["hidden"] else ""
    if len(ranks) > len(gpus):
        found.append(
            Finding(
                "devices",
                "fail",
                f"{host}: {len(ranks)} ranks, but {said['words']}{hidden}",
                cause="a mask hides GPUs that are there"
                if said["hidden"]
                else "more ranks were asked for than the machine has GPUs",
                cure="unset or widen the mask, or start one rank per visible GPU"
                if said["hidden"]
                else f"start {len(gpus)} rank(s) there (--gpus, --nproc_per_node)",
                **here,
            )
        )
    elif len(ranks) < len(gpus):
        found.append(
            Finding(
                "devices",
                "warn",
                f"{host}: {len(gpus) - len(ranks)} of {len(gpus)} GPUs stay idle{hidden}",
                cause=f"only {len(ranks)} rank(s) were started there",
                cure=f"start {len(gpus)} rank(s) (--gpus, --nproc_per_node), or mask the others",
                **here,
            )
        )
    elif said["hidden"]:
        found.append(_masked(host, said, "note", here))
    for gpu in gpus[: len(ranks)]:
        found += _gpu(host, gpu, here)
    return found or [Finding("devices", "ok", f"{host}: {said['words']}", **here)]


def _masked(host: str, said: Account, status: Status, here: dict[str, Any]) -> Finding:
    return Finding(
        "devices",
        status,
        f"{host}: {said['words']}; {', '.join(said['hidden'])}",
        cause="the variable leaves them out for this process and all it starts",
        cure="unset it to use every GPU",
        **here,
    )


def _gpu(host: str, gpu: Account, here: dict[str, Any]) -> list[Finding]:
    found, label = [], f"{host}: GPU {gpu['index']}"
    if gpu["pids"]:
        found.append(
            Finding(
                "devices",
                "warn",
                f"{label} is in use by {', '.join(name(pid) for pid in gpu['pids'])}",
                cause="another job computes there, or a killed one left a process behind",
                cure="wait for it or end it; or leave that GPU out with CUDA_VISIBLE_DEVICES",
                **here,
            )
        )
    elif gpu["free_gib"] is not None and gpu["free_gib"] < FREE_SHARE * gpu["memory_gib"]:
        found.append(
            Finding(
                "devices",
                "warn",
                f"{label} has {gpu['free_gib']:.1f} of {gpu['memory_gib']:.1f} GiB free",
                cause="memory is held by a process that this user or container cannot see",
                cure="look with `nvidia-smi` outside the container; restart the machine if nobody owns it",
                **here,
            )
        )
    if gpu["ecc_errors"] or gpu["xids"]:
        errors = [f"{gpu['ecc_errors']} uncorrected memory errors"] if gpu["ecc_errors"] else []
        errors += [f"Xid {', '.join(map(str, gpu['xids'][-3:]))}"] if gpu["xids"] else []
        found.append(
            Finding(
                "devices",
                "warn",
                f"{label} reports {' and '.join(errors)} since the driver was loaded",
                cause="the GPU, its memory or its slot may be failing",
                cure="reset it (nvidia-smi --gpu-reset) and run `dcgmi diag -r 3`; if errors come back, "
                "leave it out and have it replaced",
                **here,
            )
        )
    return found


def _cpu_host(host: str, ranks: list[int], said: Account) -> list[Finding]:
    here: dict[str, Any] = {"ranks": tuple(ranks), "hosts": (host,)}
    found = []
    if said["hidden"]:
        found.append(_masked(host, said, "warn", here))
    if len(ranks) > said["cpus"]:
        found.append(
            Finding(
                "devices",
                "warn",
                f"{host}: {len(ranks)} ranks share {said['cpu_words']}",
                cause="more ranks were asked for than there are cores, so they wait for each other",
                cure=f"start at most {said['cpus']} rank(s) there",
                **here,
            )
        )
    if said["competitors"]:
        found.append(
            Finding(
                "devices",
                "warn",
                f"{host}: others keep its cores busy: {'; '.join(said['competitors'][:3])}",
                cause="programs beside the training take time from its ranks",
                cure="end them, or keep them off the ranks' cores (taskset, a cgroup)",
                **here,
            )
        )
    words = f"{host}: no GPU, {len(ranks)} CPU rank(s) on {said['cpu_words']}"
    return found or [Finding("devices", "ok", words, **here)]
