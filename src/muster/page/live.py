"""Runs that are read again and again: each part of what the page shows as JSON, with its version."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from muster import run_directory
from muster.errors import MusterError, UnreadableError
from muster.page.build import REMEDY, document
from muster.page.compare import compare
from muster.page.document import Summary
from muster.page.read import RunFacts, RunFiles, Vanished
from muster.page.summary import summary
from muster.reading.libraries import refused

FRESH_S = 0.9  # as often as ranks write; several viewers share one reading
ENDED_FRESH_S = 10.0  # of a run that has ended, in the list
MOST_KEPT = 8  # runs whose steps are kept in memory

_versions = itertools.count(1)


class Sections:
    """Parts by name, each as JSON. A part that changed gets a version above all before."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.versions: dict[str, int] = {}
        self.read_at = float("-inf")

    @property
    def version(self) -> int:
        return max(self.versions.values(), default=0)

    def update(self, parts: Mapping[str, Any]) -> None:
        for name, part in parts.items():
            text = to_json(part)
            if self.texts.get(name) != text:
                self.texts[name], self.versions[name] = text, next(_versions)
        self.read_at = time.monotonic()

    def whole(self) -> str:
        """One document, and its version."""
        return join({"version": str(self.version), **self.texts})


def to_json(document: Any) -> str:
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode(errors="replace").decode()  # a path may be no text


def join(texts: Mapping[str, str]) -> str:
    """One object of values that are JSON already."""
    return "{" + ",".join(f'"{name}":{text}' for name, text in texts.items()) + "}"


class LiveRun:
    """One run, for one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.files = RunFiles(path)
        self.sections = Sections()
        self.lock = threading.RLock()

    def refresh(self) -> Sections:
        """Raises `Vanished` when its directory is gone."""
        with self.lock:
            if time.monotonic() - self.sections.read_at >= FRESH_S:
                with refused(f"the run in {self.files.run.path}", REMEDY):
                    self.files.refresh()
                    self.sections.update(document(self.files))
            return self.sections


class LiveRuns:
    """The runs of a folder, or those given."""

    def __init__(self, root: Path, given: Iterable[Path] | None = None) -> None:
        self.root = root
        self.given = None if given is None else [path.resolve() for path in given]
        self._open: OrderedDict[Path, LiveRun] = OrderedDict()
        self._lines: dict[Path, tuple[float, RunFacts, Summary]] = {}
        self._list = Sections()
        self._lock, self._list_lock = threading.Lock(), threading.Lock()

    def paths(self) -> dict[str, Path]:
        """By name: a run in another folder that has the name of one before gets a number."""
        found = self.given
        if found is None:
            found = [run.path.resolve() for run in run_directory.every(self.root)]
        named: dict[str, Path] = {}
        for path in found:
            names = itertools.chain([path.name], (f"{path.name}-{n}" for n in itertools.count(2)))
            named[next(name for name in names if name not in named)] = path
        return named

    def path(self, name: str) -> Path:
        """Only of a run that is listed: a name is never taken for a path."""
        found = self.paths().get(name)
        if found is None:
            raise MusterError(f"no run {name!r} in {self.root}")
        return found

    def run(self, name: str) -> LiveRun:
        path = self.path(name)
        with self._lock:
            run = self._open.setdefault(path, LiveRun(path))
            self._open.move_to_end(path)
            while len(self._open) > MOST_KEPT:
                self._open.popitem(last=False)
        return run

    def read_newest(self) -> None:
        """Before someone asks for it: the first reading of a long run takes seconds."""
        with suppress(MusterError, StopIteration):
            self.run(next(iter(self.paths()))).refresh()

    def list(self) -> Sections:
        """The section `runs`, newest first."""
        with self._list_lock:
            if time.monotonic() - self._list.read_at >= FRESH_S:
                named = self.paths()
                self._lines = {
                    path: self._lines[path] for path in named.values() if path in self._lines
                }
                lines = [line for name, path in named.items() if (line := self._line(name, path))]
                self._list.update({"runs": lines})
            return self._list

    def _line(self, name: str, path: Path) -> Summary | None:
        now = time.monotonic()
        read_at, facts, line = self._lines.get(path) or (float("-inf"), RunFacts(path), None)
        if line is None or now - read_at >= (FRESH_S if facts.alive else ENDED_FRESH_S):
            try:
                with refused(f"the run in {path}", REMEDY):
                    facts.refresh()
                    line = summary(facts) | {"name": name}  # type: ignore[assignment]
                    to_json(line)
            except (Vanished, UnreadableError, OSError):  # its storage may be away: the others stay
                self._lines.pop(path, None)
                return None
            assert line is not None
            self._lines[path] = (now, facts, line)
        return line

    def compare(self, a: str, b: str) -> str:
        first, second = self.run(a), self.run(b)
        with ExitStack() as held:
            for run in sorted({first, second}, key=lambda run: run.files.run.path):
                held.enter_context(run.lock)
                run.refresh()
            with refused(f"what differs between {a} and {b}", REMEDY):
                return to_json(compare(first.files, second.files))
