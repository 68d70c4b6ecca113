"""Which devices this machine offers, found without importing torch."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
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

    @property
    def devices(self) -> int:
        """Ranks a run uses when nobody says otherwise: every GPU, or one process on all cores."""
        return len(self.gpus) or 1

    def describe(self) -> str:
        if self.gpus:
            return f"{len(self.gpus)} × {self.gpus[0].name} ({self.gpus[0].memory_gib:.0f} GiB)"
        return f"no GPU, {self.cpus} CPU cores"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def detect() -> Inventory:
    return Inventory(
        gpus=_nvidia(),
        cpus=len(os.sched_getaffinity(0)),
        memory_gib=psutil.virtual_memory().total / 2**30,
        host=platform.node(),
    )


def _nvidia() -> tuple[Gpu, ...]:
    """NVIDIA GPUs that `CUDA_VISIBLE_DEVICES` leaves visible, in its order."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver, no library, no permission: all mean no usable GPU
        return ()
    found = []
    try:
        for i in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(i)
            uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
            found.append(Gpu(i, name, pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30, uuid))
    finally:
        pynvml.nvmlShutdown()
    return tuple(
        Gpu(place, gpu.name, gpu.memory_gib, gpu.uuid)
        for place, gpu in enumerate(_visible(found, os.environ.get("CUDA_VISIBLE_DEVICES")))
    )


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
