"""The devices of this machine, found without importing torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from muster.errors import LaunchError
from muster.hardware import amd, cpus, network, nvidia, rehearsal
from muster.hardware.cpus import Cpus
from muster.hardware.devices import Found, Gpu, Hidden, Pcie, Process
from muster.hardware.network import InfinibandPort, Interface

__all__ = ["Cpus", "Gpu", "Hidden", "Inventory", "Pcie", "Process", "detect"]


@dataclass(frozen=True)
class Inventory:
    gpus: tuple[Gpu, ...]
    cpus: int  # cores this process can keep busy
    memory_gib: float
    host: str
    links: tuple[tuple[int, int], ...] = ()  # pairs of GPUs that NVLink or XGMI connects, by index
    nvswitch: bool = False  # the links go through switches, which can reduce (NVLink SHARP)
    interfaces: tuple[str, ...] = ()  # network interfaces that are up
    paths: tuple[
        tuple[int, int, str], ...
    ] = ()  # the PCIe path between two GPUs: PIX PXB PHB NODE SYS
    hidden: tuple[Hidden, ...] = ()  # GPUs that this process may not use, and why
    cpu: Cpus | None = None
    network: tuple[Interface, ...] = ()  # those fit for ranks first
    infiniband: tuple[InfinibandPort, ...] = ()
    driver: str | None = None

    def rank_count(
        self,
        asked: int | Literal["all", "auto"] | None = None,
        *,
        cpu_ranks: int = 1,
        share: bool = False,
    ) -> int:
        """How many ranks to start here: `asked`; by default one per GPU, or `cpu_ranks` without one.

        `all` is one per GPU, or one per CPU core. With `share`, and in a rehearsal, ranks may share a GPU.
        """
        if asked == "all":
            return len(self.gpus) or self.cpus
        if not isinstance(asked, int):
            return len(self.gpus) or cpu_ranks
        if self.gpus and asked > len(self.gpus) and not (share or rehearsal.active()):
            raise LaunchError(
                f"--gpus {asked}, but this machine offers {self.describe()}; ask for at most "
                f"{len(self.gpus)}, for all of them with --gpus all, or let {asked} ranks share them "
                f"with --rehearse {asked}"
            )
        return asked

    def describe(self) -> str:
        if self.gpus:
            return f"{len(self.gpus)} × {self.gpus[0].name} ({self.gpus[0].memory_gib:.0f} GiB)"
        return f"no GPU, {self.cpus} CPU cores"

    def describe_links(self) -> str:
        """NVLink (or XGMI) among the GPUs, in the form `GPU 0↔1, 2↔3`."""
        pairs = len(self.gpus) * (len(self.gpus) - 1) // 2
        if not self.links:
            return "none" if pairs else "one GPU, nothing to link"
        if len(self.links) == pairs and pairs > 1:
            return "between all GPUs" + (", through NVSwitch" if self.nvswitch else "")
        return "GPU " + ", ".join(f"{a}↔{b}" for a, b in self.links)

    def describe_hidden(self) -> list[str]:
        """One line per reason: `GPU 2, 3 hidden by CUDA_VISIBLE_DEVICES`."""
        reasons: dict[str, list[str]] = {}
        for gpu in self.hidden:
            reasons.setdefault(gpu.by, []).append(str(gpu.physical))
        phrases = {by: f"by {by}" if by.endswith("_DEVICES") else f"since {by}" for by in reasons}
        return [f"GPU {', '.join(gpus)} hidden {phrases[by]}" for by, gpus in reasons.items()]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def detect(root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> Inventory:
    """Masks in `env` are honoured, and what they hide is listed. `root` holds /sys and /proc."""
    found = nvidia.find(root, env) or Found(())
    if not found.gpus and not found.hidden:
        found = amd.find(root, env) or Found(())
    cores, interfaces = cpus.find(root), network.interfaces(root)
    return Inventory(
        gpus=found.gpus,
        cpus=cores.usable,
        memory_gib=psutil.virtual_memory().total / 2**30,
        host=platform.node(),
        links=found.links,
        nvswitch=found.nvswitch,
        interfaces=tuple(sorted(interface.name for interface in interfaces)),
        paths=found.paths,
        hidden=found.hidden,
        cpu=cores,
        network=interfaces,
        infiniband=network.infiniband(root),
        driver=found.driver,
    )
