"""Which devices this machine offers, found without importing torch."""

from __future__ import annotations

import itertools
import os
import platform
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil


@dataclass(frozen=True)
class Gpu:
    index: int  # among those this process may use
    name: str
    memory_gib: float
    uuid: str


@dataclass(frozen=True)
class Inventory:
    gpus: tuple[Gpu, ...]
    cpus: int  # cores this process may run on
    memory_gib: float
    host: str
    links: tuple[tuple[int, int], ...] = ()  # pairs of GPUs that NVLink connects, by index
    nvswitch: bool = False  # the links go through switches, which can add up on the way
    interfaces: tuple[str, ...] = ()  # network interfaces that are up

    @property
    def devices(self) -> int:
        """Ranks a run uses when nobody says otherwise: every GPU, or one process on all cores."""
        return len(self.gpus) or 1

    def describe(self) -> str:
        if self.gpus:
            return f"{len(self.gpus)} × {self.gpus[0].name} ({self.gpus[0].memory_gib:.0f} GiB)"
        return f"no GPU, {self.cpus} CPU cores"

    def describe_links(self) -> str:
        """NVLink among the GPUs, in the form `GPU 0↔1, 2↔3`."""
        pairs = len(self.gpus) * (len(self.gpus) - 1) // 2
        if not self.links:
            return "none" if pairs else "one GPU, nothing to link"
        if len(self.links) == pairs and pairs > 1:
            return "between all GPUs" + (", through NVSwitch" if self.nvswitch else "")
        return "GPU " + ", ".join(f"{a}↔{b}" for a, b in self.links)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def detect() -> Inventory:
    gpus, links, nvswitch = _nvidia()
    return Inventory(
        gpus=gpus,
        cpus=len(os.sched_getaffinity(0)),
        memory_gib=psutil.virtual_memory().total / 2**30,
        host=platform.node(),
        links=links,
        nvswitch=nvswitch,
        interfaces=tuple(sorted(n for n, state in psutil.net_if_stats().items() if state.isup)),
    )


def _nvidia() -> tuple[tuple[Gpu, ...], tuple[tuple[int, int], ...], bool]:
    """NVIDIA GPUs that `CUDA_VISIBLE_DEVICES` leaves visible, in its order, and their links."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver, no library, no permission: all mean no usable GPU
        return (), (), False
    found = []
    try:
        for i in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(i)
            uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
            found.append(Gpu(i, name, pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30, uuid))
        chosen = _visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))
        handles = [pynvml.nvmlDeviceGetHandleByIndex(gpu.index) for gpu in chosen]
        links = tuple(
            (a, b)
            for a, b in itertools.combinations(range(len(handles)), 2)
            if _linked(pynvml, handles[a], handles[b])
        )
        nvswitch = bool(links) and all(_behind_switch(pynvml, handle) for handle in handles)
    finally:
        pynvml.nvmlShutdown()
    gpus = tuple(replace(gpu, index=place) for place, gpu in enumerate(chosen))
    return gpus, links, nvswitch


def _linked(pynvml: Any, one: Any, other: Any) -> bool:
    """Whether NVLink joins two GPUs, directly or through switches. Unknown counts as no."""
    try:
        status = pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except Exception:  # a driver too old to say, a virtual GPU, a lost one
        return False
    return bool(status == pynvml.NVML_P2P_STATUS_OK)


def _behind_switch(pynvml: Any, gpu: Any) -> bool:
    """Whether the other end of the GPU's first live link is a switch. Unknown counts as no."""
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not pynvml.nvmlDeviceGetNvLinkState(gpu, link):
                continue
            end = pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link)
        except Exception:
            return False
        return bool(end == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH)
    return False


def _visible(found: list[Gpu], mask: str | None) -> list[Gpu]:
    """CUDA's rule: indices or UUID prefixes, cut off at the first that does not exist.

    A device named twice, or a prefix that fits several, leaves none at all.
    """
    if mask is None:
        return found
    chosen: list[Gpu] = []
    for word in (w.strip() for w in mask.split(",")):
        match = [
            g
            for g in found
            if (word.isdigit() and g.index == int(word)) or (word and g.uuid.startswith(word))
        ]
        if not match:
            break
        if len(match) > 1 or match[0] in chosen:
            return []
        chosen.append(match[0])
    return chosen
