"""trackers.json of the run directory: each tracker's id, and up to which step it was sent what.

A resumed run repeats the steps after its checkpoint. Trackers that keep both values of a repeated step are not
sent it again.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.errors import UnreadableError
from muster.reading import json_file
from muster.writing import write_json

if TYPE_CHECKING:
    from muster.observe.trackers.sender import Point

TRACKERS_FILE = "trackers.json"
LONGEST_ID, LARGEST = 1024, 2**53


class Sent:
    """Shared by the threads of all trackers."""

    def __init__(self, folder: Path) -> None:
        self._path, self._lock = folder / TRACKERS_FILE, threading.Lock()
        found: dict[str, Any] = {}
        with suppress(OSError, UnreadableError):
            found = json_file.read(self._path)
        self._before = {name: _tracker(told) for name, told in found.items()}
        self._now = {name: _tracker(told) for name, told in found.items()}

    def id_of(self, name: str) -> str | None:
        found: str | None = self._before.get(name, {}).get("id")
        return found

    def started(self, name: str, given: str | None) -> None:
        with self._lock:
            self._now.setdefault(name, _tracker(None))["id"] = given
            write_json(self._path, self._now)

    def without_repeated(self, name: str, points: list[Point]) -> list[Point]:
        """Those of steps that no earlier start of this run has sent, noted as sent now."""
        last = self._before.get(name, {}).get("steps", {})
        new = [point for point in points if point.step > last.get(point.group, 0)]
        if new:
            with self._lock:
                steps = self._now.setdefault(name, _tracker(None))["steps"]
                for point in new:
                    steps[point.group] = max(point.step, steps.get(point.group, 0))
                write_json(self._path, self._now)
        return new


def _tracker(told: Any) -> dict[str, Any]:
    """What the file says of one, as far as it is of the kind expected."""
    told = told if isinstance(told, dict) else {}
    given, steps = told.get("id"), told.get("steps")
    return {
        "id": str(given)[:LONGEST_ID] if isinstance(given, str | int) else None,
        "steps": {
            group: step
            for group, step in (steps.items() if isinstance(steps, dict) else ())
            if type(step) is int and 0 <= step <= LARGEST
        },
    }
