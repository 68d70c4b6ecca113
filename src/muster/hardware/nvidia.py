"""NVIDIA's GPUs, from its driver (NVML)."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from muster.hardware.devices import (
    Found,
    Gpu,
    Hidden,
    Pcie,
    Process,
    hidden_gpus,
    numa_node,
    visible,
)

MASK = "CUDA_VISIBLE_DEVICES"
ONE_SLICE = "CUDA shows a process one MIG slice, the first that its mask names"
XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:]+)[^)]*\): (\d+)")


def find(root: Path, env: Mapping[str, str]) -> Found | None:
    """None where there is no driver. A GPU the driver cannot read is hidden, not an error: the mask
    may well leave it out."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver, no library, no permission: all mean no usable GPU
        return None
    try:
        return _find(pynvml, root, env.get(MASK))
    finally:
        pynvml.nvmlShutdown()


def _find(nvml: Any, root: Path, mask: str | None) -> Found:
    units: list[Gpu] = []  # what a rank may use: GPUs, and MIG slices instead of GPUs in MIG mode
    handles: dict[str, Any] = {}
    broken: list[Hidden] = []
    xids = _xids()
    for number in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            whole = _gpu(nvml, handle, number, root, xids)
            slices = list(_slices(nvml, handle, whole))
        except Exception as error:
            broken.append(Hidden(number, "?", "", f"the driver cannot read it: {error}"))
            continue
        for unit, its_handle in slices or [(whole, handle)]:
            units.append(unit)
            handles[unit.uuid] = its_handle
    chosen = visible(units, mask)
    hidden = hidden_gpus(units, chosen, MASK)
    if chosen and chosen[0].mig:
        hidden += hidden_gpus(chosen, chosen[:1], ONE_SLICE)
        chosen = chosen[:1]
    mine = [handles[gpu.uuid] for gpu in chosen]
    pairs = list(itertools.combinations(range(len(mine)), 2))
    links = tuple((a, b) for a, b in pairs if _linked(nvml, mine[a], mine[b]))
    ancestors = {(a, b): _ancestor(nvml, mine[a], mine[b]) for a, b in pairs}
    return Found(
        gpus=tuple(replace(gpu, index=place) for place, gpu in enumerate(chosen)),
        hidden=tuple(sorted((*hidden, *broken), key=lambda gpu: gpu.physical)),
        links=links,
        nvswitch=bool(links) and all(_behind_switch(nvml, handle) for handle in mine),
        paths=tuple((a, b, path) for (a, b), path in ancestors.items() if path),
        driver=_query(nvml, "nvmlSystemGetDriverVersion"),
    )


def _query(nvml: Any, function: str, *arguments: Any) -> Any:
    """None where the driver is too old, the GPU too simple, or the caller not allowed."""
    try:
        return getattr(nvml, function)(*arguments)
    except Exception:
        return None


def _gpu(nvml: Any, handle: Any, number: int, root: Path, xids: dict[str, list[int]] | None) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    pci = _query(nvml, "nvmlDeviceGetPciInfo", handle)
    bus = pci.busId[-12:].lower() if pci else None  # NVML writes eight digits of domain, /sys four
    return Gpu(
        index=number,
        name=nvml.nvmlDeviceGetName(handle),
        memory_gib=memory.total / 2**30,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        physical=number,
        free_gib=memory.free / 2**30,
        bus_id=bus,
        numa=numa_node(root / "sys/bus/pci/devices" / bus) if bus else None,
        pcie=_pcie(nvml, handle),
        nvlinks=len(_live_links(nvml, handle)),
        ecc_errors=_ecc_errors(nvml, handle),
        xids=None if xids is None or bus is None else tuple(xids.get(bus[:-2], ())),
        processes=_processes(nvml, handle),
    )


def _slices(nvml: Any, handle: Any, whole: Gpu) -> Iterator[tuple[Gpu, Any]]:
    """The MIG instances of a GPU in MIG mode; none of others."""
    mode = _query(nvml, "nvmlDeviceGetMigMode", handle)  # now, after the next reset
    if not mode or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
        return
    for number in range(_query(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        part = _query(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
        if part is None:
            continue  # that slot is empty
        memory = nvml.nvmlDeviceGetMemoryInfo(part)
        yield (
            replace(
                whole,
                name=nvml.nvmlDeviceGetName(part),
                uuid=nvml.nvmlDeviceGetUUID(part),
                memory_gib=memory.total / 2**30,
                free_gib=memory.free / 2**30,
                processes=_processes(nvml, part),
                mig=True,
                nvlinks=0,
            ),
            part,
        )


def _pcie(nvml: Any, handle: Any) -> Pcie | None:
    which = [
        f"{when}PcieLink{what}" for when in ("Curr", "Max") for what in ("Generation", "Width")
    ]
    numbers = [_query(nvml, f"nvmlDeviceGet{name}", handle) for name in which]
    return None if None in numbers else Pcie(*numbers)


def _ecc_errors(nvml: Any, handle: Any) -> int | None:
    try:
        kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return int(nvml.nvmlDeviceGetTotalEccErrors(handle, *kinds))
    except Exception:  # no ECC memory, or switched off
        return None


def _processes(nvml: Any, handle: Any) -> tuple[Process, ...] | None:
    found = _query(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
    if found is None:
        return None
    used = [(p.pid, p.usedGpuMemory) for p in found]
    return tuple(Process(pid, None if size is None else size / 2**30) for pid, size in used)


def _xids() -> dict[str, list[int]] | None:
    """Error numbers by PCI address without its function, from the kernel's log since the machine
    started; None where this user may not read it. NVML itself only reports later errors."""
    try:
        log = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=2)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if log.returncode:
        return None
    found: dict[str, list[int]] = {}
    for address, number in XID.findall(log.stdout):
        found.setdefault(address.lower(), []).append(int(number))
    return found


def _linked(nvml: Any, one: Any, other: Any) -> bool:
    """Whether NVLink joins two GPUs, directly or through switches. Unknown counts as no."""
    index = nvml.NVML_P2P_CAPS_INDEX_NVLINK
    status = _query(nvml, "nvmlDeviceGetP2PStatus", one, other, index)
    return status is not None and bool(status == nvml.NVML_P2P_STATUS_OK)


def _ancestor(nvml: Any, one: Any, other: Any) -> str | None:
    """The common ancestor of two GPUs on PCIe, as `nvidia-smi topo -m` names it."""
    level = _query(nvml, "nvmlDeviceGetTopologyCommonAncestor", one, other)
    names = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
    return names.get(level)


def _live_links(nvml: Any, handle: Any) -> list[int]:
    """NVLinks of a GPU that are up. Unknown counts as none."""
    numbers = range(nvml.NVML_NVLINK_MAX_LINKS)
    return [n for n in numbers if _query(nvml, "nvmlDeviceGetNvLinkState", handle, n)]


def _behind_switch(nvml: Any, handle: Any) -> bool:
    """Whether the other end of the GPU's first live link is a switch. Unknown counts as no."""
    for link in _live_links(nvml, handle)[:1]:
        end = _query(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        return end is not None and bool(end == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH)
    return False
