"""Step 2: enough devices for the ranks, GPUs hidden by a mask, and other processes on them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import psutil

from muster.checks.context import RankContext, RankReport
from muster.checks.findings import Finding, RankNames, Status
from muster.hardware import rehearsal
from muster.hardware.inventory import Inventory

SAMPLE_S = 0.3
BUSY = 0.5  # of a core: another program, not a background service
FREE_SHARE = 0.9  # of a GPU's memory; the driver itself takes a few percent


def measure(context: RankContext) -> RankReport:
    """Local rank 0 reports for its host, others what they see: a launcher may show each rank one GPU. No rank
    uses a GPU yet, so any process on one is another job's."""
    found = context.inventory
    report = device_report(found)
    if context.rank_info.local_rank:
        return {"uuids": report["uuids"]}
    return report | {"competitors": [] if found.gpus else competitors()}


def device_report(found: Inventory) -> RankReport:
    return {
        "devices": found.describe(),
        "uuids": [gpu.uuid for gpu in found.gpus],
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
        "cpu": found.cpu.describe() if found.cpu else f"{found.cpus} CPU cores",
    }


def competitors() -> list[str]:
    """Other processes that keep a core busy while all ranks wait."""
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
    """In a container, the process that the driver names may not be visible."""
    try:
        process = psutil.Process(pid)
        return f"{process.name()} (pid {pid}, user {process.username()})"
    except (psutil.Error, KeyError):
        return f"pid {pid}"


def judge(reports: Mapping[int, RankReport], rank_names: RankNames) -> list[Finding]:
    found: list[Finding] = []
    for host, ranks in rank_names.hosts().items():
        report = next((reports[rank] for rank in ranks if "gpus" in reports[rank]), None)
        if report is None:
            continue  # no local rank 0: the ranks step reports it
        visible = len({uuid for rank in ranks for uuid in reports[rank].get("uuids", ())})
        found += (
            _gpu_host(host, ranks, report, visible) if visible else _cpu_host(host, ranks, report)
        )
    return found


def _gpu_host(host: str, ranks: list[int], report: RankReport, visible: int) -> list[Finding]:
    """`visible`: GPUs that any rank of the host sees."""
    here: dict[str, Any] = {"ranks": tuple(ranks), "hosts": (host,)}
    gpus, found = report["gpus"], []
    hidden = f"; {', '.join(report['hidden'])}" if report["hidden"] else ""
    if rehearsal.active():
        words = f"{host}: {len(ranks)} ranks share {report['devices']} in a rehearsal"
        found.append(Finding("devices", "note", words, **here))
    elif len(ranks) > visible:
        found.append(
            Finding(
                "devices",
                "fail",
                f"{host}: {len(ranks)} ranks, but {report['devices']}{hidden}",
                cause="a mask hides GPUs that are there"
                if report["hidden"]
                else "more ranks were asked for than the machine has GPUs",
                cure="unset or widen the mask, or start one rank per visible GPU"
                if report["hidden"]
                else f"start {visible} rank(s) there (--gpus, --nproc_per_node), or let ranks share "
                f"GPUs with {rehearsal.FLAG}",
                **here,
            )
        )
    elif len(ranks) < visible:
        found.append(
            Finding(
                "devices",
                "warn",
                f"{host}: {visible - len(ranks)} of {visible} GPUs stay idle{hidden}",
                cause=f"only {len(ranks)} rank(s) were started there",
                cure=f"start {visible} rank(s) (--gpus, --nproc_per_node), or mask the others",
                **here,
            )
        )
    elif report["hidden"]:
        found.append(_masked(host, report, "note", here))
    for gpu in gpus[: len(ranks)]:
        found += _gpu(host, gpu, here)
    return found or [Finding("devices", "ok", f"{host}: {report['devices']}", **here)]


def _masked(host: str, report: RankReport, status: Status, here: dict[str, Any]) -> Finding:
    return Finding(
        "devices",
        status,
        f"{host}: {report['devices']}; {', '.join(report['hidden'])}",
        cause="the variable hides them from this process and all its children",
        cure="unset it to use every GPU",
        **here,
    )


def _gpu(host: str, gpu: RankReport, here: dict[str, Any]) -> list[Finding]:
    found, label = [], f"{host}: GPU {gpu['index']}"
    if gpu["pids"]:
        found.append(
            Finding(
                "devices",
                "warn",
                f"{label} is in use by {', '.join(name(pid) for pid in gpu['pids'])}",
                cause="another job runs on it, or a killed job left a process",
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
                cure="look with `nvidia-smi` outside the container; restart the machine if no process holds it",
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


def _cpu_host(host: str, ranks: list[int], report: RankReport) -> list[Finding]:
    here: dict[str, Any] = {"ranks": tuple(ranks), "hosts": (host,)}
    found = []
    if report["hidden"]:
        found.append(_masked(host, report, "warn", here))
    if len(ranks) > report["cpus"]:
        found.append(
            Finding(
                "devices",
                "warn",
                f"{host}: {len(ranks)} ranks share {report['cpu']}",
                cause="more ranks were asked for than there are cores, so they wait for each other",
                cure=f"start at most {report['cpus']} rank(s) there",
                **here,
            )
        )
    if report["competitors"]:
        found.append(
            Finding(
                "devices",
                "warn",
                f"{host}: other processes keep its cores busy: {'; '.join(report['competitors'][:3])}",
                cause="other programs take CPU time from the ranks",
                cure="end them, or keep them off the ranks' cores (taskset, a cgroup)",
                **here,
            )
        )
    message = f"{host}: no GPU, {len(ranks)} CPU rank(s) on {report['cpu']}"
    return found or [Finding("devices", "ok", message, **here)]
