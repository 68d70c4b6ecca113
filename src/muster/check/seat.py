"""What one rank brings to every step of the check."""

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

from muster.check.board import Board
from muster.check.findings import Finding, Roll
from muster.hardware import inventory
from muster.hardware.inventory import Inventory
from muster.launch.cluster import Place
from muster.parallel import mesh as meshes
from muster.parallel.layout import Layout
from muster.parallel.mesh import Mesh

Account = dict[str, Any]  # what one rank says about one step: JSON


@dataclass(frozen=True)
class Options:
    """What is asked of every rank. `timeout_s` limits each wait; the data step gets longer."""

    timeout_s: float = 30.0
    recipe: str | None = None
    overrides: list[str] = field(default_factory=list)


class Seat:
    def __init__(
        self, place: Place, board: Board, options: Options, mesh: Mesh | None = None
    ) -> None:
        self.place, self.board, self.options = place, board, options
        self.inventory: Inventory = inventory.detect()  # before this rank is pinned to its share
        self._mesh = mesh

    @cached_property
    def device(self) -> torch.device:
        """Bound on first use: never before the step that checks it."""
        return self.mesh.device if self._mesh else meshes.bind_device(self.place.local_rank)

    @property
    def mesh(self) -> Mesh:
        """The process group, joined on first use: never before ranks were found to be in order."""
        if self._mesh is None:
            place = self.place
            limit = self.options.timeout_s / 2  # so that who waits in vain can still say so in time
            group = dist.PrefixStore("check/group", self.board.store)  # type: ignore[attr-defined]
            layout = Layout(replicate=place.world)
            self._mesh = meshes.join(place.rank, place.local_rank, layout, "auto", limit, group)
        return self._mesh

    def meet(self, name: str, limit_s: float = 0.0) -> None:
        limit = max(limit_s, self.options.timeout_s)
        self.board.meet(name, self.place.rank, self.place.world, limit)

    def sign_in(self) -> None:
        """Who and where this rank is. `net` tells hosts of one name apart, `boot` machines: several
        containers of one machine share its cores."""
        place = self.place
        self.board.post(
            f"here/{place.rank}",
            {
                "rank": place.rank,
                "local_rank": place.local_rank,
                "local_world": place.local_world,
                "launcher": place.launcher,
                "host": os.uname().nodename,
                "pid": os.getpid(),
                "address": own_address(place.address),
                "net": os.stat("/proc/self/ns/net").st_ino,
                "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            },
        )


@dataclass(frozen=True)
class Step:
    """`measure` runs on every rank, `judge` once, on what all of them said."""

    name: str
    measure: Callable[[Seat], Account]
    judge: Callable[[Mapping[int, Account], Roll], list[Finding]]
    ends: bool = False  # a failure here leaves nothing to try for later steps
    limit_s: float = 0.0  # where it may take longer than other waits


def own_address(towards: str) -> str:
    """This machine's address as seen from `towards`. Nothing is sent."""
    try:
        family, *_, where = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError:
        return "unknown address"
