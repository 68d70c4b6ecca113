"""The table of all ranks in the terminal: read from the files that the ranks write."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from muster.observe import shapes
from muster.observe.heartbeats import Heartbeats, State
from muster.observe.results import read_last
from muster.reading.names import number

EVERY_S = 1.0  # as often as ranks write
SILENT_S = 10.0  # without a heartbeat
TIMES = ("compute_s", "comm_wait_s", "data_wait_s")
MOST = 16  # rows; of more ranks, those that compute longest


@dataclass(frozen=True)
class RankRow:
    """`times` in milliseconds: computing, waiting for others, waiting for data; of the last step
    written, which may be before `step`."""

    rank: int
    host: str
    step: int | None
    phase: str
    times: tuple[float, float, float] | None
    memory_gib: float | None

    def cells(self) -> list[str]:
        return [
            str(self.rank),
            self.host,
            "" if self.step is None else str(self.step),
            self.phase,
            *(f"{value:.0f}" for value in self.times or ()),
            *([""] * 3 if self.times is None else []),
            "" if self.memory_gib is None else f"{self.memory_gib:.2f}",
        ]


class RankTable:
    COLUMNS = ("rank", "host", "step", "phase", "compute ms", "wait ms", "data ms", "GiB")

    def __init__(self, folder: Path) -> None:
        self.folder, self._heartbeats = folder, Heartbeats(folder)
        self._table, self._due = Table(), 0.0

    def table(self) -> Table:
        """Read at most once a second, however often it is drawn."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + EVERY_S
            rows = self.rows()
            self._table = Table(*self.COLUMNS, box=None, header_style="dim", pad_edge=False)
            for row in shown(rows):
                self._table.add_row(*row.cells())
            if len(rows) > MOST:
                self._table.caption = f"the slowest {MOST} of {len(rows)} ranks"
        return self._table

    def lines(self) -> list[str]:
        return [
            "  ".join(
                f"{name} {cell}" for name, cell in zip(self.COLUMNS, cells, strict=True) if cell
            )
            for cells in (row.cells() for row in shown(self.rows()))
        ]

    def rows(self) -> list[RankRow]:
        """Of the present start: an earlier one may have had more ranks. While it begins, those that have a
        heartbeat."""
        self._heartbeats.refresh()
        info = shapes.info(shapes.document(self.folder.parent / "run.json"))
        world = info.get("ranks")
        if world is None and info.get("state") == "starting":
            return [self._row(rank) for rank in sorted(self._heartbeats.latest)]
        numbers = {p.name.split(".")[0] for p in self.folder.glob("*.json*")}
        ranks = {found for n in numbers if (found := number(n)) is not None} | {
            *self._heartbeats.latest
        }
        return [self._row(rank) for rank in sorted(ranks) if world is None or rank < world]

    def _row(self, rank: int) -> RankRow:
        heartbeat = self._heartbeats.latest.get(rank, {})
        last = _line(heartbeat)
        if not last and heartbeat.get("step") is not None:  # else the file has an earlier start's
            last = read_last(self.folder / f"{rank}.jsonl")
        times = None
        if last and None not in (parts := [last.get(name) for name in TIMES]):
            compute, wait, data = (1e3 * float(part or 0.0) for part in parts)
            times = (compute, wait, data)
        step = heartbeat.get("step") or last.get("step")
        host = str(heartbeat.get("host", ""))
        phase = _phase(heartbeat, self._heartbeats.silent_s(rank))
        return RankRow(rank, host, step, phase, times, last.get("memory_gib"))


def _line(heartbeat: State) -> dict[str, Any]:
    """Of the latest step, where the rank's heartbeat has it."""
    found = heartbeat.get("line")
    if isinstance(found, dict) and all(isinstance(found.get(n), int | float) for n in TIMES):
        return found
    return {}


def shown(rows: list[RankRow]) -> list[RankRow]:
    """In order of rank; the slowest where there are too many."""
    slowest = sorted(rows, key=lambda row: -(row.times or (0.0,))[0])[:MOST]
    return sorted(slowest, key=lambda row: row.rank)


def _phase(heartbeat: State, silent_s: float) -> str:
    """By the rank's own clock: this machine's may show another time."""
    if not heartbeat:
        return ""
    if silent_s > SILENT_S:
        return f"no heartbeat for {silent_s:.0f} s"
    phase, now = str(heartbeat.get("phase", "")), heartbeat["time"]
    since = now - heartbeat.get("since", now) + silent_s
    return f"{phase} for {since:.0f} s" if since > SILENT_S else phase
