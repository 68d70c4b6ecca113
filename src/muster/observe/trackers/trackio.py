"""Trackio, by its own environment variables: TRACKIO_DIR, TRACKIO_SPACE_ID and others."""

from __future__ import annotations

import os
from typing import Any

from muster.observe.trackers.base import PROJECT, Status, Tracker, TrackerRun


class Trackio(Tracker):
    """Trackio finds a run by its project and name, so the name is the id."""

    def start(self, run: TrackerRun) -> str:
        import trackio

        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=run.id or run.name,
            config=run.flat_recipe(),
            resume="allow" if run.id else "never",
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return str(self._run.name)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def finish(self, status: Status) -> None:
        self._run.finish()
