"""The heartbeats of all ranks, as whoever watches a run reads them.

One process of each node writes those of its ranks into one file, `ranks/node-<n>.heartbeats.json`
(`muster.observe.gather`). A rank whose node does not take its heartbeat writes `ranks/<rank>.heartbeat.json`
itself. Of two, the one that changed last counts, and before any has changed the newer by the rank's clock, which may
be set back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from muster.reading import json_file
from muster.reading.files import open_no_link
from muster.reading.names import number
from muster.reading.shape import Kind, all_kept

STALL_FILE = "stalled"  # in ranks/, with the attempt: a rank stalled
OWN, OF_NODES = "*.heartbeat.json", "node-*.heartbeats.json"
State = Mapping[str, Any]
STATE: Mapping[str, Kind] = {
    **dict.fromkeys(("host", "phase", "call", "thread"), "text"),
    **dict.fromkeys(("time", "since"), "finite"),
    **dict.fromkeys(("rank", "pid", "step"), "count"),
}


def stall_file(folder: Path, attempt: str) -> Path:
    return folder / (f"{STALL_FILE}-{attempt}" if attempt else STALL_FILE)


def read(folder: Path) -> dict[int, State]:
    """By rank; `folder` is ranks/ of a run."""
    found = Heartbeats(folder)
    found.refresh()
    return found.latest


class Heartbeats:
    """Read again and again: files that have not changed are not opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.latest: dict[int, State] = {}
        self._files: dict[str, tuple[tuple[int, int, int], list[State]]] = {}
        self._seen: dict[tuple[str, int], tuple[float, float]] = {}  # of each file and rank
        self._changed: dict[int, float] = {}  # when a new one was seen, by the monotonic clock

    @property
    def files(self) -> int:
        """That the last look opened."""
        return len(self._files)

    def refresh(self) -> None:
        paths = [path for pattern in (OWN, OF_NODES) for path in self.folder.glob(pattern)]
        self._files = {path.name: found for path in paths if (found := self._file(path))}
        now, seen = time.monotonic(), self._seen
        newest: dict[int, State] = {}
        best: dict[int, tuple[float, float]] = {}  # when it changed, and its time
        self._seen = {}
        for name, (_, states) in self._files.items():
            for state in states:
                key = (name, rank := state["rank"])
                told, changed = seen.get(key, (state["time"], 0.0))
                own = (state["time"], changed if told == state["time"] else now)
                self._seen[key] = own
                if rank not in newest or own[::-1] >= best[rank]:
                    newest[rank], best[rank] = state, own[::-1]
        for rank, state in newest.items():
            if rank in self.latest and self.latest[rank]["time"] != state["time"]:
                self._changed[rank] = time.monotonic()
        self.latest = dict(sorted(newest.items()))

    def silent_s(self, rank: int) -> float:
        """Since its last heartbeat: by this machine's monotonic clock once a new one was seen, until then by
        the clocks of both machines, of which one may be wrong."""
        if rank not in self.latest:
            return 0.0
        if rank in self._changed:
            return time.monotonic() - self._changed[rank]
        return max(0.0, time.time() - float(self.latest[rank]["time"]))

    def _file(self, path: Path) -> tuple[tuple[int, int, int], list[State]] | None:
        """Opened before its size is asked for, as NFS wants it. None for one that is gone, or is no heartbeat."""
        known = self._files.get(path.name)
        try:
            with open_no_link(path, folders=1) as file:
                found = os.fstat(file.fileno())
                stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
                if known and known[0] == stamp:
                    return known
                return stamp, list(
                    _states(json_file.parse_value(file.read(json_file.MOST), path), path.name)
                )
        except (OSError, ValueError):
            return None


def _states(document: Any, name: str) -> Iterator[State]:
    """Of a rank's own file, whose name says which rank, or of a node's: what is no heartbeat is left out."""
    own = number(name.partition(".")[0])
    if own is not None and isinstance(document, dict):
        found: Any = [{**document, "rank": own}]
    else:
        found = document.get("ranks") if isinstance(document, dict) else None
    yield from all_kept(found, STATE, "rank", "time")
