"""A run's files, read as they grow. Nothing is unpickled, and nothing is written."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from muster.errors import MusterError
from muster.observe import shapes
from muster.observe.choices import PLAN_FILE
from muster.observe.heartbeats import Heartbeats, State
from muster.observe.results import read_last
from muster.page.files import Growing, JsonFile, documents, from_json
from muster.page.table import Floats, Table, parse
from muster.page.times import RankTimes
from muster.reading import yaml_file
from muster.run_directory import ALIVE, Run

MOST_RANKS = 2**16  # run.json may say any number


class Vanished(MusterError):
    """The run directory was removed, or its storage is away."""


class RunFacts:
    """What the small files of a run say, as of the last `refresh`: enough for a line of the list. Not for
    several threads at once."""

    def __init__(self, path: Path) -> None:
        self.run = Run(path)
        self.events: list[dict[str, Any]] = []
        self.last: dict[str, Any] = {}  # line of metrics.jsonl
        self.state = "unknown"
        self.read_at = 0.0
        self._events = Growing(path / "events.jsonl")
        self._info = JsonFile(path / "run.json", _info)
        self._recipe = JsonFile(path / "recipe.yaml", _from_yaml)
        self._plan = JsonFile(path / PLAN_FILE)
        self._results = JsonFile(path / "training_results.json")

    @property
    def info(self) -> dict[str, Any]:
        return self._info.value

    @property
    def recipe(self) -> dict[str, Any]:
        """Another one when the run goes on with other values."""
        return self._recipe.value

    @property
    def plan(self) -> dict[str, Any]:
        return self._plan.value

    @property
    def results(self) -> dict[str, Any]:
        """Those of an earlier start do not count once the run goes on."""
        return self._results.value if self.state in ("finished", "stopped") else {}

    @property
    def alive(self) -> bool:
        return self.state in ALIVE

    @property
    def steps(self) -> int | None:
        """How many the run is to have."""
        asked = self.recipe.get("training", {}).get("steps") or self.plan.get("steps")
        return int(asked) if asked else None

    def refresh(self) -> None:
        """Read what is new."""
        path = self.run.path
        if not (path / "run.json").is_file():
            raise Vanished(f"{path} is no longer there, or holds no run.json")
        self.read_at = time.time()
        for document in (self._info, self._recipe, self._plan, self._results):
            document.refresh()
        self.state = self.run.state()
        for fresh, text in self._events.chunks():
            self.events = [] if fresh else self.events
            self.events += filter(None, map(shapes.event, documents(text)))
        self.last = read_last(path / "metrics.jsonl")


class RunFiles(RunFacts):
    """Everything that the page shows of a run."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.metrics = Table()
        self.times = RankTimes(path / "ranks")
        self._metrics = Growing(path / "metrics.jsonl")
        self._environment = JsonFile(path / "environment.json")
        self._data = JsonFile(path / "data.json")
        self._heartbeats = Heartbeats(path / "ranks")

    @property
    def heartbeats(self) -> Mapping[int, State]:
        return self._heartbeats.latest

    @property
    def environment(self) -> dict[str, Any]:
        return self._environment.value

    @property
    def data(self) -> dict[str, Any]:
        return self._data.value

    @property
    def ranks(self) -> list[int]:
        """Of the present attempt; files of ranks that an earlier one had are left aside."""
        world = self.info.get("ranks")
        if isinstance(world, int) and 0 <= world <= MOST_RANKS:
            return list(range(world))
        return sorted({*self.heartbeats, *self.times.recent})

    def refresh(self) -> None:
        super().refresh()
        self._environment.refresh()
        self._data.refresh()
        for fresh, text in self._metrics.chunks():
            if fresh:
                self.metrics.clear()
            self.metrics.extend(parse(text))
        self.times.refresh()
        self._heartbeats.refresh()

    def silent_s(self, rank: int) -> float:
        """Since the rank's last heartbeat."""
        return self._heartbeats.silent_s(rank)

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


def _info(text: bytes) -> Any:
    return shapes.info(from_json(text))


def _from_yaml(text: bytes) -> Any:
    return yaml_file.parse(text, "recipe.yaml")
