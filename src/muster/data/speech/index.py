"""The index of durations: the length of each clip, read once from the audio headers and cached.

It is stored beside the data (or in the user's cache where the data is read-only) and valid while size
and mtime of the file do not change; for clips in separate files, theirs too. Processes that need the
same index need no collective: one takes a file lock and builds it, the others wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muster.data.cache import load_index, lock, save_index, stamp
from muster.data.parquet import AudioTable, Cells, FileProblem, ParquetClips
from muster.data.progress import Progress, log_tenths
from muster.data.speech import audio
from muster.data.speech.folder import FolderClips
from muster.errors import DataError

log = logging.getLogger(__name__)

POLL_S, LONGEST_POLL_S = 0.05, 2.0  # doubled each time
MAX_BYTES = 512 << 20  # of row groups that threads hold at once
FILES_AT_A_TIME = 4096
LONGEST_S = 1e6  # of a clip
LOCK_TIMEOUT_S = 1800.0  # then it is built twice, which is only slower

File = tuple[str, int, int, str]
"""Name from the table's folder, bytes, time of change in ns, kind."""


@dataclass
class Index:
    """Durations and problems of the rows of one file."""

    seconds: NDArray[np.float64]  # 0 where there is a problem
    problems: dict[int, str] = field(default_factory=dict)  # row → why it cannot be read
    unsettled: set[int] = field(
        default_factory=set
    )  # the problem may be fixed without changing the table
    kinds: Counter[str] = field(default_factory=Counter)  # "FLAC 16000 Hz" → clips
    decoded: bool = False  # clips were decoded, not only their headers read
    files: dict[int, File] = field(default_factory=dict)  # of readable clips in separate files

    def to_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds.tolist(),
            "problems": dict(self.problems),
            "unsettled": sorted(self.unsettled),
            "kinds": dict(self.kinds),
            "decoded": self.decoded,
            "files": dict(self.files),
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Index:
        """ValueError, TypeError or such where it is no index: it lies where others may write."""
        seconds = np.array(saved["seconds"], np.float64)
        found = cls(
            seconds,
            {int(row): str(why) for row, why in saved["problems"].items()},
            set(saved["unsettled"]),
            Counter({str(kind): int(count) for kind, count in saved["kinds"].items()}),
            bool(saved["decoded"]),
            {
                int(row): (str(name), int(size), int(time_ns), str(kind))
                for row, (name, size, time_ns, kind) in saved["files"].items()
            },
        )
        if seconds.ndim != 1 or not ((seconds >= 0) & (seconds < LONGEST_S)).all():
            raise ValueError("durations that no clip has")
        named = [*found.problems, *found.unsettled, *found.files]
        if any(type(row) is not int or not 0 <= row < len(seconds) for row in named):
            raise ValueError("rows that are not there")
        if set(np.flatnonzero(seconds == 0).tolist()) != set(found.problems):
            raise ValueError("rows with neither a duration nor a problem")
        if any("\0" in name for name, *_ in found.files.values()):
            raise ValueError("names that no file has")
        return found

    def update(self, rows: NDArray[np.int64], part: Index) -> None:
        """Merge the index of some of the rows."""
        self.seconds[rows] = part.seconds
        self.problems |= {int(rows[i]): why for i, why in part.problems.items()}
        self.unsettled |= {int(rows[i]) for i in part.unsettled}
        self.files |= {int(rows[i]): file for i, file in part.files.items()}
        self.kinds += part.kinds

    def drop(self, rows: set[int]) -> None:
        self.unsettled -= rows
        for row in rows:
            self.problems.pop(row, None)
            if file := self.files.pop(row, None):
                self.kinds -= Counter([file[-1]])


def measure(cells: Cells, rows: NDArray[np.int64], decode: bool) -> Index:
    """The index of these rows of `cells` alone."""
    index = Index(np.zeros(len(rows)))
    for i, row in enumerate(rows.tolist()):
        clip: audio.Clip | None = None
        try:
            clip = cells.clip(row)
            before = _state(clip) if isinstance(clip, Path) else None
            found = audio.header(clip)
            if not found.frames:
                raise DataError("the clip has zero length")
            if decode:
                audio.read(clip, found.rate, found.seconds)
        except DataError as error:
            index.problems[i] = str(error)
            if isinstance(clip, Path) or isinstance(error, FileProblem):
                index.unsettled.add(i)
        else:
            index.seconds[i] = found.seconds
            kind = f"{found.container} {found.rate} Hz"
            index.kinds[kind] += 1
            if isinstance(clip, Path) and before is not None:
                inside = clip.is_relative_to(cells.folder)  # then the folder may move
                name = clip.relative_to(cells.folder) if inside else clip
                index.files[i] = (str(name), *before, kind)
    return index


def _state(path: Path | str) -> tuple[int, int] | None:
    try:
        stat = os.stat(path)
    except (OSError, ValueError):
        return None
    return stat.st_size, stat.st_mtime_ns


def open_table(
    path: Path, audio_column: str | None = None, text_column: str | None = None
) -> AudioTable:
    kind = FolderClips if path.suffix in (".csv", ".jsonl") else ParquetClips
    return kind(path, audio_column, text_column)


def ensure_index(
    paths: Sequence[Path],
    audio_column: str | None = None,
    text_column: str | None = None,
    *,
    progress: Progress | None = None,
    decode: bool = False,
) -> list[Index]:
    """The index of every file, built where there is none yet.

    `decode` also decodes every clip; those that fail are problems from then on.
    """
    tables = [open_table(path, audio_column, text_column) for path in paths]
    return index_tables(tables, progress, decode)


def index_tables(
    tables: Sequence[AudioTable], progress: Progress | None = None, decode: bool = False
) -> list[Index]:
    """Files, and row groups within them, in parallel threads.

    Threads are enough: reading parquet and libsndfile release the GIL, and parsing a header in Python
    takes microseconds. Every process begins with another file, so that concurrent ones share the
    work.
    """
    tell = progress or log_tenths(log, "indexed the durations of %d of %d clips")
    counter = _Progress(sum(table.rows for table in tables), tell)
    budget = _MemoryBudget(MAX_BYTES)
    order = np.roll(np.arange(len(tables)), os.getpid()).tolist()
    threads = min(16, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as files, ThreadPoolExecutor(threads) as groups:
        found = files.map(
            lambda i: _load_or_build(tables[i], decode, groups, counter, budget), order
        )
        return [index for _, index in sorted(zip(order, found, strict=True), key=lambda p: p[0])]


class _Progress:
    """Counts the indexed rows of all files and reports progress."""

    def __init__(self, total: int, report: Progress) -> None:
        self.total, self.done, self._report, self._lock = total, 0, report, threading.Lock()

    def add(self, rows: int) -> None:
        with self._lock:
            self.done += rows
            self._report(self.done, self.total)


class _MemoryBudget:
    """Limits the bytes that all threads hold; a larger request waits until nothing else is held."""

    def __init__(self, size: int) -> None:
        self.size, self.used, self._condition = size, 0, threading.Condition()

    @contextlib.contextmanager
    def acquire(self, size: int) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: not self.used or self.used + size <= self.size)
            self.used += size
        try:
            yield
        finally:
            with self._condition:
                self.used -= size
                self._condition.notify_all()


def _load_or_build(
    table: AudioTable,
    decode: bool,
    pool: ThreadPoolExecutor,
    counter: _Progress,
    budget: _MemoryBudget,
) -> Index:
    deadline, pause = time.monotonic() + LOCK_TIMEOUT_S, POLL_S
    while True:
        index = _load(table, decode)
        if index is not None and not _stale(index, table, pool):
            counter.add(table.rows)
            return index
        with lock(table.path) as acquired:
            if acquired or time.monotonic() > deadline:
                return _build(table, decode, pool, counter, budget)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_POLL_S)


def _stale(index: Index, table: AudioTable, pool: ThreadPoolExecutor) -> set[int]:
    """Rows to index again: those whose file could not be read, or has changed."""
    folder, files = str(table.path.parent), list(index.files.items())

    def changed(start: int) -> set[int]:
        part = files[start : start + FILES_AT_A_TIME]
        return {
            row for row, (name, *was, _) in part if _state(os.path.join(folder, name)) != tuple(was)
        }

    return index.unsettled.union(*pool.map(changed, range(0, len(files), FILES_AT_A_TIME)))


def _build(
    table: AudioTable,
    decode: bool,
    pool: ThreadPoolExecutor,
    counter: _Progress,
    budget: _MemoryBudget,
) -> Index:
    of = stamp(table.path, table.column)
    index = _load(table, decode)  # another process may have been faster
    rows = np.arange(table.rows)
    if index is None:
        index, before = Index(np.zeros(table.rows), decoded=decode), None
    else:
        before, stale = index.to_json(), _stale(index, table, pool)
        rows = np.array(sorted(stale), np.int64)
        index.drop(stale)
    counter.add(table.rows - len(rows))
    inside = np.split(rows, np.searchsorted(rows, table.starts[1:]))

    def look(group: int) -> Index:
        own = inside[group]
        if not len(own):
            return Index(np.zeros(0))
        with budget.acquire(int(table.sizes[group])):
            try:
                part = measure(table.read(group), own - table.starts[group], index.decoded)
            except DataError as error:  # the row group cannot be read
                why, indices = str(error), range(len(own))
                part = Index(np.zeros(len(own)), dict.fromkeys(indices, why), set(indices))
        counter.add(len(own))
        return part

    for group, part in enumerate(pool.map(look, range(len(table.starts)))):
        index.update(inside[group], part)
    if index.to_json() != before:
        save_index(table.path, of, index.to_json())
    return index


def _load(table: AudioTable, decode: bool) -> Index | None:
    saved = load_index(table.path, table.column)
    try:
        index = Index.from_json(saved)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    fits = len(index.seconds) == table.rows and index.decoded >= decode
    return index if fits else None
