"""What every step of the check gets on one rank: rank, devices, process group, messages."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from muster.checks.findings import Finding, RankNames
from muster.checks.messages import MessageStore
from muster.hardware import inventory
from muster.hardware.inventory import Inventory
from muster.launch.cluster import RankInfo
from muster.parallel import mesh as meshes
from muster.parallel.layout import Layout
from muster.parallel.mesh import Mesh

RankReport = dict[str, Any]  # one rank's measurements of one step: JSON


@dataclass(frozen=True)
class Options:
    """The same on every rank. `timeout_s` limits each wait; the data step gets longer."""

    timeout_s: float = 30.0
    recipe: str | None = None
    overrides: list[str] = field(default_factory=list)


class RankContext:
    def __init__(
        self,
        rank_info: RankInfo,
        messages: MessageStore,
        options: Options,
        mesh: Mesh | None = None,
    ) -> None:
        self.rank_info, self.messages, self.options = rank_info, messages, options
        self.inventory: Inventory = inventory.detect()  # before this rank is pinned to its share
        self._mesh = mesh

    @cached_property
    def device(self) -> torch.device:
        """Bound on first use: never before the step that checks it."""
        return self.mesh.device if self._mesh else meshes.bind_device(self.rank_info.local_rank)

    @property
    def mesh(self) -> Mesh:
        """The process group, initialized on first use: never before the ranks step has passed."""
        if self._mesh is None:
            rank_info = self.rank_info
            limit = self.options.timeout_s / 2  # so that a rank that times out can still report it
            group = dist.PrefixStore("check/group", self.messages.store)  # type: ignore[attr-defined]
            layout = Layout(replicate=rank_info.world)
            self._mesh = meshes.join(
                rank_info.rank, rank_info.local_rank, layout, "auto", limit, group
            )
        return self._mesh

    def barrier(self, name: str, limit_s: float = 0.0) -> None:
        limit = max(limit_s, self.options.timeout_s)
        self.messages.barrier(name, self.rank_info.rank, self.rank_info.world, limit)

    def register(self) -> None:
        """Post this rank's rank, host and process. `net` distinguishes hosts of the same name, `boot`
        machines: several containers of one machine share its cores."""
        rank_info = self.rank_info
        self.messages.post(
            f"registered/{rank_info.rank}",
            {
                "rank": rank_info.rank,
                "local_rank": rank_info.local_rank,
                "local_world": rank_info.local_world,
                "launcher": rank_info.launcher,
                "host": os.uname().nodename,
                "pid": os.getpid(),
                "address": own_address(rank_info.address),
                "net": os.stat("/proc/self/ns/net").st_ino,
                "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            },
        )


@dataclass(frozen=True)
class Step:
    """`measure` runs on every rank, `judge` once, on the reports of all ranks."""

    name: str
    measure: Callable[[RankContext], RankReport]
    judge: Callable[[Mapping[int, RankReport], RankNames], list[Finding]]
    ends: bool = False  # later steps cannot run after a failure of this one
    limit_s: float = 0.0  # where it may take longer than other waits
    timed: bool = False  # compares speeds, so that a rehearsal leaves it out


def own_address(target: str) -> str:
    """This machine's address on the route to `target`. Nothing is sent."""
    try:
        family, *_, where = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError:
        return "unknown address"
