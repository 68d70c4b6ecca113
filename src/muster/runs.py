"""The run directory: make it, find it, know how it fares, clear it away.

Everything about a run is in its folder, so that any process can look at it: the recipe, what was
planned and found, the metrics, the logs, and `run.json` with who runs it and how it ended.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from muster.errors import MusterError
from muster.observe.results import read_lines, write_json

ENDED = ("finished", "failed", "stopped")
ALIVE = ("starting", "running")


@dataclass(frozen=True)
class Run:
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    def info(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.path / "run.json").read_text()))
        except (OSError, ValueError):
            return {}

    def update(self, **changes: Any) -> None:
        write_json(self.path / "run.json", {**self.info(), **changes})

    def own(self, process: int | None = None) -> None:
        """Note which process stands for the run, so that others can tell whether it lives."""
        pid = process or os.getpid()
        self.update(
            pid=pid, pid_created=psutil.Process(pid).create_time(), host=os.uname().nodename
        )

    def state(self) -> str:
        """starting, running, finished, failed, stopped; `interrupted` when its process is gone."""
        info = self.info()
        state = str(info.get("state", "unknown"))
        if state in ENDED or self._alive(info):
            return state
        return "interrupted"

    def _alive(self, info: dict[str, Any]) -> bool:
        here = os.uname().nodename
        if info.get("host", here) != here:
            return True  # another machine's process cannot be seen from here
        try:
            process = psutil.Process(info["pid"])
            # A recycled process id, or the same after a reboot, has another birthday.
            return (
                abs(process.create_time() - info["pid_created"]) < 1.0
                and process.status() != psutil.STATUS_ZOMBIE
            )
        except (KeyError, psutil.Error):
            return False

    def last_metrics(self) -> dict[str, Any]:
        lines = read_lines(self.path / "metrics.jsonl")
        return lines[-1] if lines else {}

    def results(self) -> dict[str, Any] | None:
        path = self.path / "training_results.json"
        return json.loads(path.read_text()) if path.is_file() else None


def create(root: Path, name: str, documents: dict[str, str]) -> Run:
    """A new folder `<name>-<time>` with `documents` in it; `latest` then points to it."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        path = _new_folder(root, f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    except OSError as error:
        raise MusterError(f"logging.dir: cannot make a run in {root} ({error.strerror})") from None
    (path / "ranks").mkdir()
    for file, text in documents.items():
        (path / file).write_text(text)
    run = Run(path)
    run.update(state="starting", created=time.time())
    run.own()  # until whoever runs it says so: a start that failed must not look alive for ever
    link = root / f".latest-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(path.name)
    os.replace(link, root / "latest")
    return run


def _new_folder(root: Path, name: str) -> Path:
    """`name`, or where two runs start in the same second `name-2`, `name-3` …"""
    numbered = (f"{name}-{n}" for n in itertools.count(2))
    path = root / name
    while True:
        try:
            path.mkdir()
            return path
        except FileExistsError:
            path = root / next(numbered)


def find(text: str, root: Path = Path("runs")) -> Run:
    """A run by folder, by name, or `latest`."""
    for candidate in (Path(text), root / text):
        if (candidate / "run.json").is_file():
            return Run(candidate.resolve())
    known = ", ".join(run.name for run in every(root)[:5]) or "none"
    raise MusterError(f"no run {text!r}; newest in {root}: {known}")


def every(root: Path) -> list[Run]:
    """All runs in `root`, newest first."""
    found = [Run(p) for p in root.glob("*") if not p.is_symlink() and (p / "run.json").is_file()]
    return sorted(found, key=lambda run: run.info().get("created", 0.0), reverse=True)


def clean(root: Path, keep: int = 0) -> list[Run]:
    """Which ended runs beyond the newest `keep` can go. Living ones never do."""
    return [run for run in every(root)[keep:] if run.state() not in ALIVE]


def remove(run: Run) -> None:
    if run.state() in ALIVE:
        raise MusterError(f"{run.name} is still {run.state()}; stop it first")
    root = run.path.parent
    shutil.rmtree(run.path)
    latest = root / "latest"
    if latest.is_symlink() and not latest.exists():
        latest.unlink()
        rest = every(root)
        if rest:
            latest.symlink_to(rest[0].name)
