"""Step 1: installed versions, and those that are incompatible."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from typing import Any

import torch

from muster import __version__
from muster.checks.context import RankContext, RankReport
from muster.checks.findings import Finding, RankNames, find_outliers

OLDEST_TORCH = (2, 11)
SAME_EVERYWHERE = ("muster", "python", "torch", "CUDA", "ROCm", "NCCL")


def measure(context: RankContext) -> RankReport:
    return {
        "muster": __version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "NCCL": _nccl(),
        "usable": torch.cuda.is_available(),
        "gpus": len(context.inventory.gpus),
        "vendor": "amd" if any(g.vendor == "amd" for g in context.inventory.gpus) else "nvidia",
        "built_for": torch.cuda.get_arch_list() if torch.version.cuda else [],
        **_driver(),
    }


def _nccl() -> str | None:
    if not torch.version.cuda and not torch.version.hip:
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _driver() -> dict[str, Any]:
    """NVIDIA's driver: its version, the newest CUDA it can run, each GPU's compute capability."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver or no permission: the devices step reports the consequence
        return {"driver": None, "driver_cuda": None, "capabilities": []}
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        newest = pynvml.nvmlSystemGetCudaDriverVersion()  # 12040 for 12.4
        return {
            "driver": str(pynvml.nvmlSystemGetDriverVersion()),
            "driver_cuda": [newest // 1000, newest % 1000 // 10],
            "capabilities": [list(pynvml.nvmlDeviceGetCudaComputeCapability(h)) for h in handles],
        }
    except Exception:  # a virtual or lost GPU
        return {"driver": None, "driver_cuda": None, "capabilities": []}
    finally:
        pynvml.nvmlShutdown()


def judge(reports: Mapping[int, RankReport], rank_names: RankNames) -> list[Finding]:
    found = [_differing(name, reports, rank_names) for name in SAME_EVERYWHERE]
    for ranks in rank_names.hosts().values():
        found += [_fault(reports[ranks[0]], ranks, rank_names)]
    problems = [finding for finding in found if finding]
    return problems or [Finding("software", "ok", _summary(reports[min(reports)]))]


def _summary(report: RankReport) -> str:
    parts = [f"python {report['python']}", f"torch {report['torch']}"]
    parts += [f"{name} {report[name]}" for name in ("CUDA", "ROCm", "NCCL") if report[name]]
    parts += [f"driver {report['driver']}"] if report["driver"] else []
    return ", ".join(parts)


def _differing(
    name: str, reports: Mapping[int, RankReport], rank_names: RankNames
) -> Finding | None:
    usual, odd = find_outliers({rank: report[name] for rank, report in reports.items()})
    if not odd:
        return None
    return Finding(
        "software",
        "fail",
        f"{rank_names.names(odd)} has {name} {reports[odd[0]][name]}, the others have {usual}",
        cause="the machines have different environments; ranks of different versions hang or fail",
        cure=f"install the same {name} everywhere, or use one environment on shared storage",
        ranks=tuple(odd),
        hosts=rank_names.hosts_of(odd),
    )


def _fault(report: RankReport, ranks: list[int], rank_names: RankNames) -> Finding | None:
    """What is incompatible on one host, the first cause first."""
    version = tuple(int(n) for n in re.findall(r"\d+", report["torch"])[:2])
    built, newest = report["CUDA"], report["driver_cuda"]
    wanted = [f"sm_{major}{minor}" for major, minor in report["capabilities"]]
    unknown = sorted({sm for sm in wanted if not _runs_on(sm, report["built_for"])})
    if version < OLDEST_TORCH:
        message = f"torch {report['torch']} is older than muster supports"
        cause = "an older environment is active"
        cure = "pip install -U 'torch>=2.11'"
    elif report["gpus"] and not built and not report["ROCm"]:
        message = f"{report['gpus']} GPU(s), but this torch was built for CPUs only"
        cause = "torch was installed from an index without GPU builds"
        maker = "rocm" if report["vendor"] == "amd" else "cu"
        cure = f"reinstall torch from the index of your {maker} version: https://pytorch.org/get-started"
    elif report["gpus"] and built and newest and int(built.split(".")[0]) > newest[0]:
        message = f"torch was built for CUDA {built}; driver {report['driver']} runs up to {newest[0]}.{newest[1]}"
        cause = "the driver is older than torch's CUDA"
        cure = f"update the driver, or install a torch built for CUDA {newest[0]}"
    elif report["gpus"] and built and unknown:
        message = f"this torch has no kernels for {', '.join(unknown)} (it has {', '.join(report['built_for'])})"
        cause = "the GPU is newer or older than those torch was built for"
        cure = "install a torch built for it (a newer one for a new GPU): https://pytorch.org/get-started"
    elif report["gpus"] and not report["usable"]:
        message = f"the driver sees {report['gpus']} GPU(s), torch cannot use them"
        cause = (
            "driver and library do not match (after an update without a restart), or the container "
        )
        cause += "lacks the GPU runtime"
        cure = "restart the machine; in a container start with --gpus all; see `nvidia-smi`"
    else:
        return None
    message = f"{rank_names.host(ranks[0])}: {message}"
    return Finding(
        "software", "fail", message, cause, cure, tuple(ranks), rank_names.hosts_of(ranks)
    )


def _runs_on(sm: str, built_for: list[str]) -> bool:
    """Code for sm_80 runs on every later 8.x; PTX (compute_80) is translated for all later ones."""
    major, minor = int(sm[3:-1]), int(sm[-1])
    for arch in built_for:
        kind, _, digits = arch.partition("_")
        digits = "".join(re.findall(r"\d", digits))  # sm_90a
        if not digits:
            continue
        had = int(digits[:-1]), int(digits[-1])
        if kind == "compute" and had <= (major, minor):
            return True
        if had[0] == major and had[1] <= minor:
            return True
    return not built_for
