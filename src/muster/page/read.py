"""A run's files, read as they grow. Nothing is unpickled, and nothing is written."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from muster.errors import MusterError
from muster.observe.choices import PLAN_FILE
from muster.page.files import Growing, JsonFile, documents
from muster.page.table import Floats, Table, parse
from muster.page.times import RankTimes
from muster.run_directory import Run

DOCUMENTS = {
    "info": "run.json",
    "plan": PLAN_FILE,
    "environment": "environment.json",
    "data": "data.json",
    "results": "training_results.json",
}


class Vanished(MusterError):
    """The run directory was removed, or its storage is away."""


class RunFiles:
    """What the files of a run hold, as of the last `refresh`. Not for several threads at once."""

    def __init__(self, path: Path) -> None:
        self.run = Run(path)
        self.metrics = Table()
        self.events: list[dict[str, Any]] = []
        self.heartbeats: dict[int, dict[str, Any]] = {}
        self.recipe: dict[str, Any] = {}
        self.times = RankTimes(path / "ranks")
        self.read_at = 0.0
        self._metrics = Growing(path / "metrics.jsonl")
        self._events = Growing(path / "events.jsonl")
        self._beats: dict[int, JsonFile] = {}
        self._documents = {name: JsonFile(path / file) for name, file in DOCUMENTS.items()}

    def __getattr__(self, name: str) -> dict[str, Any]:
        """`info`, `plan`, `environment`, `data`, `results`: empty without the file."""
        if name not in DOCUMENTS:
            raise AttributeError(name)
        return self._documents[name].value

    def refresh(self) -> None:
        """Read what is new."""
        path = self.run.path
        if not (path / "run.json").is_file():
            raise Vanished(f"{path} is no longer there, or holds no run.json")
        self.read_at = time.time()
        for document in self._documents.values():
            document.refresh()
        if not self.recipe:
            self.recipe = _read_recipe(path / "recipe.yaml")
        fresh, text = self._metrics.read()
        if fresh:
            self.metrics.clear()
        self.metrics.extend(parse(text))
        fresh, text = self._events.read()
        self.events = [] if fresh else self.events
        self.events += [event for event in documents(text) if "event" in event and "time" in event]
        self.times.refresh()
        self._read_heartbeats()

    @property
    def state(self) -> str:
        return self.run.state()

    @property
    def ranks(self) -> list[int]:
        """Of the present attempt; files of ranks that an earlier one had are left aside."""
        world = self.info.get("ranks")
        if isinstance(world, int):
            return list(range(world))
        return sorted({*self.heartbeats, *self.times.recent})

    def step_times(self) -> Floats:
        """When each step ended. Metrics of older runs have no time: their steps are taken to follow each
        other from the start."""
        told = self.metrics.column("time")
        if self.metrics.rows and np.isfinite(told).all():
            return told
        taken = np.nan_to_num(self.metrics.column("step_time_s"))
        starts = [event["time"] for event in self.events if event["event"] == "started"]
        begin = starts[0] if starts else float(self.info.get("created", 0.0))
        return begin + np.cumsum(taken)

    def _read_heartbeats(self) -> None:
        files = {
            int(path.name.split(".")[0]): path
            for path in (self.run.path / "ranks").glob("*.heartbeat.json")
            if path.name.split(".")[0].isdigit()
        }
        self._beats = {rank: self._beats.get(rank, JsonFile(path)) for rank, path in files.items()}
        for file in self._beats.values():
            file.refresh()
        self.heartbeats = {rank: file.value for rank, file in self._beats.items() if file.value}


def _read_recipe(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError):
        return {}
    return document if isinstance(document, dict) else {}
