"""Stand-ins for what lies outside: NVIDIA's driver, /sys and /proc, programs on the PATH."""

import os
import sys
from types import ModuleType, SimpleNamespace

import pynvml
import pytest
from stand_ins import UUIDS

MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@pytest.fixture
def program(tmp_path, monkeypatch):
    """`program(name, text)` puts a shell script on the PATH, before all others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def make(name: str, text: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)

    return make


@pytest.fixture
def no_masks(monkeypatch):
    for name in MASKS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def driver(monkeypatch, program, no_masks):
    """A machine with four GPUs; GPU i has 10·(i + 1) GiB, and NVLink bridges join 0↔1 and 2↔3.

    GPU 1 counts two broken memory cells and its driver has complained; a program computes on GPU 3.
    """
    module = ModuleType("pynvml")
    for name in dir(pynvml):
        if name.startswith("NVML_"):  # NVIDIA's own numbers
            setattr(module, name, getattr(pynvml, name))
    module.calls = []
    module.nvmlInit = lambda: module.calls.append("init")
    module.nvmlShutdown = lambda: module.calls.append("shutdown")
    module.nvmlSystemGetDriverVersion = lambda: "580.65.06"
    module.nvmlDeviceGetCount = lambda: len(UUIDS)
    module.nvmlDeviceGetHandleByIndex = lambda i: i
    module.nvmlDeviceGetUUID = lambda i: UUIDS[i]
    module.nvmlDeviceGetName = lambda i: f"Test GPU {i}"
    module.nvmlDeviceGetMemoryInfo = lambda i: SimpleNamespace(
        total=(i + 1) * 10 * 2**30, free=(i + 1) * 9 * 2**30
    )
    module.nvmlDeviceGetPciInfo = lambda i: SimpleNamespace(busId=f"00000000:{i + 10:02X}:00.0")
    module.nvmlDeviceGetCurrPcieLinkGeneration = lambda i: 1
    module.nvmlDeviceGetMaxPcieLinkGeneration = lambda i: 5
    module.nvmlDeviceGetCurrPcieLinkWidth = lambda i: 8 if i == 2 else 16
    module.nvmlDeviceGetMaxPcieLinkWidth = lambda i: 16
    module.nvmlDeviceGetTopologyCommonAncestor = lambda a, b: (
        pynvml.NVML_TOPOLOGY_HOSTBRIDGE if a // 2 == b // 2 else pynvml.NVML_TOPOLOGY_SYSTEM
    )
    module.nvmlDeviceGetTotalEccErrors = lambda i, kind, counter: (
        2 if (i, kind, counter) == (1, 1, pynvml.NVML_VOLATILE_ECC) else 0
    )
    module.nvmlDeviceGetComputeRunningProcesses = lambda i: (
        [SimpleNamespace(pid=4711, usedGpuMemory=3 * 2**30)] if i == 3 else []
    )
    module.nvmlDeviceGetP2PStatus = lambda a, b, index: (
        pynvml.NVML_P2P_STATUS_OK
        if index == pynvml.NVML_P2P_CAPS_INDEX_NVLINK and a // 2 == b // 2
        else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
    )
    module.nvmlDeviceGetNvLinkState = lambda i, link: 2 <= link < 14  # the first two are down
    module.nvmlDeviceGetNvLinkRemoteDeviceType = lambda i, link: pynvml.NVML_NVLINK_DEVICE_TYPE_GPU
    monkeypatch.setitem(sys.modules, "pynvml", module)
    program(
        "dmesg",
        "echo '[  12.3] NVRM: Xid (PCI:0000:0b:00): 94, pid=77, name=python, Contained ECC error'\n"
        "echo '[  99.1] NVRM: Xid (PCI:0000:0b:00): 79, GPU has fallen off the bus.'",
    )
    return module
