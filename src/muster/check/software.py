"""Step 1: what is installed, and versions that do not go together."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from typing import Any

import torch

from muster import __version__
from muster.check.findings import Finding, Roll, odd_ones_out
from muster.check.seat import Account, Seat

OLDEST_TORCH = (2, 11)
SAME_EVERYWHERE = ("muster", "python", "torch", "CUDA", "ROCm", "NCCL")


def measure(seat: Seat) -> Account:
    return {
        "muster": __version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "NCCL": _nccl(),
        "usable": torch.cuda.is_available(),
        "gpus": len(seat.inventory.gpus),
        "vendor": "amd" if any(g.vendor == "amd" for g in seat.inventory.gpus) else "nvidia",
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
    except Exception:  # no driver or no permission: the devices step says what follows from it
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


def judge(accounts: Mapping[int, Account], roll: Roll) -> list[Finding]:
    found = [_differing(name, accounts, roll) for name in SAME_EVERYWHERE]
    for ranks in roll.hosts().values():
        found += [_fault(accounts[ranks[0]], ranks, roll)]
    complaints = [finding for finding in found if finding]
    return complaints or [Finding("software", "ok", _words(accounts[min(accounts)]))]


def _words(said: Account) -> str:
    parts = [f"python {said['python']}", f"torch {said['torch']}"]
    parts += [f"{name} {said[name]}" for name in ("CUDA", "ROCm", "NCCL") if said[name]]
    parts += [f"driver {said['driver']}"] if said["driver"] else []
    return ", ".join(parts)


def _differing(name: str, accounts: Mapping[int, Account], roll: Roll) -> Finding | None:
    usual, odd = odd_ones_out({rank: said[name] for rank, said in accounts.items()})
    if not odd:
        return None
    return Finding(
        "software",
        "fail",
        f"{roll.names(odd)} has {name} {accounts[odd[0]][name]}, the others have {usual}",
        cause="the machines were not set up alike; ranks of different versions hang or disagree",
        cure=f"install the same {name} everywhere, or use one environment on shared storage",
        ranks=tuple(odd),
        hosts=roll.hosts_of(odd),
    )


def _fault(said: Account, ranks: list[int], roll: Roll) -> Finding | None:
    """What does not go together on one host, the first cause first."""
    version = tuple(int(n) for n in re.findall(r"\d+", said["torch"])[:2])
    built, newest = said["CUDA"], said["driver_cuda"]
    wanted = [f"sm_{major}{minor}" for major, minor in said["capabilities"]]
    unknown = sorted({sm for sm in wanted if not _runs_on(sm, said["built_for"])})
    if version < OLDEST_TORCH:
        words = f"torch {said['torch']} is older than muster supports"
        cause = "an older environment is active"
        cure = "pip install -U 'torch>=2.11'"
    elif said["gpus"] and not built and not said["ROCm"]:
        words = f"{said['gpus']} GPU(s), but this torch was built for CPUs only"
        cause = "torch was installed from an index without GPU builds"
        maker = "rocm" if said["vendor"] == "amd" else "cu"
        cure = f"reinstall torch from the index of your {maker} version: https://pytorch.org/get-started"
    elif said["gpus"] and built and newest and int(built.split(".")[0]) > newest[0]:
        words = f"torch was built for CUDA {built}; driver {said['driver']} runs up to {newest[0]}.{newest[1]}"
        cause = "the driver is older than torch's CUDA"
        cure = f"update the driver, or install a torch built for CUDA {newest[0]}"
    elif said["gpus"] and built and unknown:
        words = f"this torch has no code for {', '.join(unknown)} (it has {', '.join(said['built_for'])})"
        cause = "the GPU is newer or older than those torch was built for"
        cure = "install a torch built for it (a newer one for a new GPU): https://pytorch.org/get-started"
    elif said["gpus"] and not said["usable"]:
        words = f"the driver sees {said['gpus']} GPU(s), torch cannot use them"
        cause = (
            "driver and library do not match (after an update without a restart), or the container "
        )
        cause += "lacks the GPU runtime"
        cure = "restart the machine; in a container start with --gpus all; see `nvidia-smi`"
    else:
        return None
    words = f"{roll.host(ranks[0])}: {words}"
    return Finding("software", "fail", words, cause, cure, tuple(ranks), roll.hosts_of(ranks))


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
