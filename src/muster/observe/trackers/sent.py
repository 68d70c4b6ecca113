"""trackers.json of the run directory: each tracker's id, and up to which step it was sent what.

A resumed run repeats the steps after its checkpoint. Trackers that keep both values of a repeated step are not
sent it again.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.writing import write_json

if TYPE_CHECKING:
    from muster.observe.trackers.sender import Point

TRACKERS_FILE = "trackers.json"


class Sent:
    """Shared by the threads of all trackers."""

    def __init__(self, folder: Path) -> None:
        self._path, self._lock = folder / TRACKERS_FILE, threading.Lock()
        try:
            found = json.loads(self._path.read_text())
            self._before: dict[str, Any] = found if isinstance(found, dict) else {}
        except (OSError, ValueError):
            self._before = {}
        self._now: dict[str, Any] = json.loads(json.dumps(self._before))

    def id_of(self, name: str) -> str | None:
        found = self._before.get(name, {}).get("id")
        return None if found is None else str(found)

    def started(self, name: str, given: str | None) -> None:
        with self._lock:
            self._now.setdefault(name, {"steps": {}})["id"] = given
            write_json(self._path, self._now)

    def without_repeated(self, name: str, points: list[Point]) -> list[Point]:
        """Those of steps that no earlier start of this run has sent, noted as sent now."""
        last = self._before.get(name, {}).get("steps", {})
        new = [point for point in points if point.step > last.get(point.group, 0)]
        if new:
            with self._lock:
                steps = self._now[name]["steps"]
                for point in new:
                    steps[point.group] = max(point.step, steps.get(point.group, 0))
                write_json(self._path, self._now)
        return new
