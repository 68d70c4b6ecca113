"""The stall report, flight recorder and stacks of each rank.

`muster.observe.heartbeat` writes these files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.observe.heartbeat import own_code
from muster.observe.heartbeats import State
from muster.observe.heartbeats import read as read_heartbeats

FREE_SIZES = ("gather", "scatter", "all_to_all")  # ranks may differ in sizes there


@dataclass(frozen=True)
class Collective:
    """`group` is the backend and the name of the process group: each backend counts for itself."""

    group: str
    number: int
    name: str
    sizes: str
    thread: str
    open: bool

    @property
    def signature(self) -> tuple[str, str]:
        free = any(self.name.startswith(name) for name in FREE_SIZES)
        return self.name, "" if free else self.sizes

    @property
    def group_name(self) -> str:
        return self.group.split(":")[-1]

    def __str__(self) -> str:
        return f"{self.name} number {self.number} of group {self.group} ({self.sizes})"


@dataclass(frozen=True)
class RankState:
    """One rank when the run stalled. `report` is empty where the rank wrote none."""

    rank: int
    heartbeat: dict[str, Any]
    report: dict[str, Any]
    collectives: list[Collective]
    groups: dict[str, list[int]]
    message: str | None  # the send or receive that NCCL has not finished
    native: str | None  # the innermost line that faulthandler saw
    crash: str | None  # its reason

    @property
    def open(self) -> Collective | None:
        """The collective it waits in. One of the checkpoint thread counts only while the rank waits for that
        thread."""
        thread = self.report.get("thread")
        main = {c.group_name for c in self.collectives if c.thread == thread}
        saving = self.report.get("phase") == "saving"
        found = [c for c in self.collectives if c.open and (saving or c.group_name in main)]
        found.sort(key=lambda c: c.thread != thread)  # and otherwise the oldest
        if not found and self.report.get("lost") and self.collectives:
            return self.collectives[-1]  # a failed one is closed
        return found[0] if found else None

    @property
    def waits(self) -> bool:
        return self.open is not None or self.call is not None

    @property
    def call(self) -> str | None:
        return self.report.get("call") or self.message

    @property
    def seconds(self) -> float:
        return float(self.report.get("seconds", 0.0))

    @property
    def line(self) -> str | None:
        lines = self.report.get("lines")
        if not lines:
            return self.native
        at = [f"{x['file']}:{x['line']} in {x['function']}: {x['code']}" for x in lines[:3]]
        return ", from ".join(at)

    @property
    def name(self) -> str:
        return f"rank {self.rank}" + (f" on {self.heartbeat['host']}" if self.heartbeat else "")

    def calls(self, group: str) -> dict[int, Collective]:
        """By number."""
        return {c.number: c for c in self.collectives if c.group == group}

    def last(self, group: str) -> int:
        return max(self.calls(group), default=0)


def read(folder: Path, rank: int, heartbeats: Mapping[int, State] | None = None) -> RankState:
    """`heartbeats`: of all ranks, if they are known."""
    known = read_heartbeats(folder) if heartbeats is None else heartbeats
    flight = _json(folder / f"{rank}.flight.json")
    entries = [(_collective(e), e["is_p2p"]) for e in flight.get("entries", [])]
    messages = [c.name for c, message in entries if message and c.open]
    report = _json(folder / f"{rank}.stall.json")
    native, crash = (None, None) if report else _fault(folder / f"{rank}.stacks.txt")
    return RankState(
        rank,
        heartbeat=report or dict(known.get(rank, {})),
        report=report,
        collectives=[c for c, message in entries if not message],
        groups=flight.get("groups", {}),
        message=messages[0] if messages else None,
        native=native,
        crash=crash,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def _fault(path: Path) -> tuple[str | None, str | None]:
    """What faulthandler wrote: the innermost line of the main thread, and why, if it was a crash."""
    text = path.read_text() if path.is_file() else ""
    crash = re.search(r"Fatal Python error: (.*)", text)
    main = re.split(r"^(?:Current t|T)hread .*\n", text, flags=re.MULTILINE)[-1]
    frames = re.findall(r'File "(.*)", line (\d+) in (\S+)', main)
    frames = [f for f in frames if own_code(f[0])] or frames
    line = "{}:{} in {}".format(*frames[0]) if frames else None
    return line, crash and crash[1]


def _collective(entry: dict[str, Any]) -> Collective:
    backend, _, name = entry["profiling_name"].rpartition(":")
    kinds = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    return Collective(
        group=f"{backend}:{entry['process_group'][0]}",
        number=entry["collective_seq_id"],
        name=name,
        sizes=", ".join(f"{kind} {size}" for kind, size in kinds),
        thread=entry.get("thread_id", ""),
        open=not entry["retired"] and entry["state"] != "completed",
    )
