"""The stall report, flight recorder and stacks of each rank.

`muster.observe.heartbeat` writes these files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.errors import UnreadableError
from muster.observe import shapes
from muster.observe.heartbeat import own_code
from muster.observe.heartbeats import State
from muster.observe.heartbeats import read as read_heartbeats
from muster.reading.files import open_file
from muster.reading.names import number
from muster.reading.shape import Kind, all_kept, kept

STALL: Mapping[str, Kind] = {
    **dict.fromkeys(("why", "phase", "host", "thread", "call", "attempt"), "text"),
    **dict.fromkeys(("seconds", "time"), "finite"),
    **dict.fromkeys(("rank", "step"), "count"),
    "lost": "flag",
    "silent": "object",
    "lines": "list",
}
BEAT: Mapping[str, Kind] = {**dict.fromkeys(("phase", "host"), "text"), "step": "count"}
LINE: Mapping[str, Kind] = {
    **dict.fromkeys(("file", "function", "code"), "text"),
    "line": "count",
}
ENTRY: Mapping[str, Kind] = {
    **dict.fromkeys(("profiling_name", "state", "thread_id"), "text"),
    **dict.fromkeys(("process_group", "input_dtypes", "input_sizes"), "list"),
    "collective_seq_id": "count",
}
ENTRY_NEEDS = ("profiling_name", "process_group", "collective_seq_id")
MOST_STACKS = 2**20  # bytes of what faulthandler wrote
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
        at = [f"{x['file']}:{x['line']} in {x['function']}: {x.get('code')}" for x in lines[:3]]
        return ", from ".join(at)

    @property
    def name(self) -> str:
        return f"rank {self.rank}" + (f" on {host}" if (host := self.heartbeat.get("host")) else "")

    def calls(self, group: str) -> dict[int, Collective]:
        """By number."""
        return {c.number: c for c in self.collectives if c.group == group}

    def last(self, group: str) -> int:
        return max(self.calls(group), default=0)


def read(
    folder: Path,
    rank: int,
    heartbeats: Mapping[int, State] | None = None,
    attempt: str | None = None,
) -> RankState:
    """`heartbeats`: of all ranks, if they are known. A report of another `attempt` counts as none."""
    known = read_heartbeats(folder) if heartbeats is None else heartbeats
    report = _stall(shapes.document(folder / f"{rank}.stall.json"))
    other = attempt is not None and report.get("attempt", attempt) != attempt
    report = {} if other else report
    flight = {} if other else shapes.document(folder / f"{rank}.flight.json")
    told = all_kept(flight.get("entries"), ENTRY, *ENTRY_NEEDS)
    entries = [(_collective(e), bool(e.get("is_p2p"))) for e in told]
    messages = [c.name for c, message in entries if message and c.open]
    native, crash = (None, None) if report else _fault(folder / f"{rank}.stacks.txt")
    return RankState(
        rank,
        heartbeat=report or kept(known.get(rank, {}), BEAT),
        report=report,
        collectives=[c for c, message in entries if not message],
        groups={
            group: ranks
            for group, ranks in kept(flight, {"groups": "object"}).get("groups", {}).items()
            if isinstance(ranks, list) and all(type(rank) is int for rank in ranks)
        },
        message=messages[0] if messages else None,
        native=native,
        crash=crash,
    )


def _stall(found: dict[str, Any]) -> dict[str, Any]:
    """A rank's report; empty for what is none."""
    report = kept(found, STALL)
    if "lines" in report:
        report["lines"] = [*all_kept(report["lines"], LINE, "file", "line", "function")]
    if "silent" in report:
        report["silent"] = {
            rank: state
            for rank, state in report["silent"].items()
            if number(rank) is not None and isinstance(state, str)
        }
    return {"lost": False, **report} if report else {}


def _fault(path: Path) -> tuple[str | None, str | None]:
    """What faulthandler wrote: the innermost line of the main thread, and why, if it was a crash."""
    text = ""
    with suppress(OSError, UnreadableError), open_file(path) as file:
        text = file.read(MOST_STACKS).decode(errors="replace")
    crash = re.search(r"Fatal Python error: (.*)", text)
    main = re.split(r"^(?:Current t|T)hread .*\n", text, flags=re.MULTILINE)[-1]
    frames = re.findall(r'File "([^"\n]*)", line ([0-9]{1,9}) in (\S+)', main)
    frames = [f for f in frames if own_code(f[0])] or frames
    line = "{}:{} in {}".format(*frames[0]) if frames else None
    return line, crash and crash[1]


def _collective(entry: dict[str, Any]) -> Collective:
    backend, _, name = entry["profiling_name"].rpartition(":")
    kinds = zip(entry.get("input_dtypes", []), entry.get("input_sizes", []), strict=False)
    return Collective(
        group=f"{backend}:{next(iter(entry['process_group']), '')}",
        number=entry["collective_seq_id"],
        name=name,
        sizes=", ".join(f"{kind} {size}" for kind, size in kinds),
        thread=entry.get("thread_id", ""),
        open=not entry.get("retired") and entry.get("state") != "completed",
    )
