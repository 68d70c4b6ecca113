"""Properties of a GPU of any vendor, and which GPUs a mask leaves visible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}  # GT/s per lane


@dataclass(frozen=True)
class Pcie:
    """An idle GPU slows its link to save power: the generation may be below the best, the width not."""

    generation: int
    width: int  # lanes
    best_generation: int
    best_width: int


@dataclass(frozen=True)
class Process:
    pid: int  # as the driver sees it; a container counts differently
    memory_gib: float | None


@dataclass(frozen=True)
class Gpu:
    """None means unknown."""

    index: int  # among those this process may use
    name: str
    memory_gib: float
    uuid: str
    vendor: Literal["nvidia", "amd"] = "nvidia"
    physical: int | None = None  # its number in nvidia-smi or rocm-smi, whatever the mask
    free_gib: float | None = None
    bus_id: str | None = None  # 0000:3b:00.0
    numa: int | None = None  # its NUMA node
    pcie: Pcie | None = None
    nvlinks: int = 0  # links that are up
    mig: bool = False  # a slice of a GPU
    ecc_errors: int | None = None  # uncorrected, since the driver was loaded
    xids: tuple[int, ...] | None = (
        None  # the driver's error numbers in the kernel log, oldest first
    )
    processes: tuple[Process, ...] | None = None  # that compute on it now


@dataclass(frozen=True)
class Hidden:
    """A GPU of this machine that this process may not use."""

    physical: int
    name: str
    uuid: str
    by: str  # the variable, or the reason


@dataclass(frozen=True)
class Found:
    """One vendor's GPUs; links and paths name them by index."""

    gpus: tuple[Gpu, ...]
    hidden: tuple[Hidden, ...] = ()
    links: tuple[tuple[int, int], ...] = ()  # pairs that NVLink or XGMI connects
    nvswitch: bool = False
    paths: tuple[tuple[int, int, str], ...] = ()  # PIX, PXB, PHB, NODE, SYS as nvidia-smi topo -m
    driver: str | None = None


def visible(found: Sequence[Gpu], mask: str | None) -> list[Gpu]:
    """CUDA's rule: numbers or UUID prefixes, cut off at the first that does not exist.

    A device named twice, or a prefix that fits several, leaves none at all. Numbers count the GPUs
    before the mask; of a GPU cut in slices, a number means the first slice.
    """
    if mask is None:
        return list(found)
    chosen: list[Gpu] = []
    for word in (w.strip() for w in mask.split(",")):
        if word.isdigit():
            match = [gpu for gpu in found if gpu.physical == int(word)][:1]
        else:
            match = [gpu for gpu in found if word and gpu.uuid.startswith(word)]
        if not match:
            break
        if len(match) > 1 or match[0] in chosen:
            return []
        chosen.append(match[0])
    return chosen


def hidden_gpus(found: Sequence[Gpu], chosen: Sequence[Gpu], by: str) -> tuple[Hidden, ...]:
    return tuple(Hidden(g.physical or 0, g.name, g.uuid, by) for g in found if g not in chosen)


def read(path: Path) -> str | None:
    """A file of /sys or /proc, or None where it is missing or forbidden."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def read_int(path: Path) -> int | None:
    text = read(path)
    return int(text) if text and text.lstrip("-").isdigit() else None


def numa_node(folder: Path) -> int | None:
    """The NUMA node of a PCI device's folder; the kernel writes -1 where it does not know."""
    node = read_int(folder / "numa_node")
    return None if node is None or node < 0 else node


def pcie_of(folder: Path) -> Pcie | None:
    """A PCI device's link from /sys: speeds read like `16.0 GT/s PCIe`."""
    speeds = [read(folder / f"{which}_link_speed") for which in ("current", "max")]
    widths = [read_int(folder / f"{which}_link_width") for which in ("current", "max")]
    generations = [GENERATIONS.get(speed.split(" ")[0]) if speed else None for speed in speeds]
    numbers = [generations[0], widths[0], generations[1], widths[1]]
    if any(number is None for number in numbers):
        return None
    return Pcie(*(number or 0 for number in numbers))
