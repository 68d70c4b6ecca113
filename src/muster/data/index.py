"""The index of durations: how long each clip is, read once from the audio's headers and kept.

It lies beside the data (or in the user's cache where the data is read-only) and holds while the
file's size and time stay the same; of clips in files of their own, theirs too. Processes that want
the same index at once need no collective: one holds a file lock and builds, the others wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muster.data import audio
from muster.data.audio_folder import FolderClips
from muster.data.cache import load_index, lock, save_index, stamp
from muster.data.parquet import AudioTable, Cells, FileProblem, ParquetClips
from muster.errors import DataError

log = logging.getLogger(__name__)

POLL_S, LONGEST_POLL_S = 0.05, 2.0  # doubled each time
ROOM_BYTES = 512 << 20  # for the row groups that threads hold at once
FILES_AT_A_TIME = 4096
PATIENCE_S = 1800.0  # for another process that builds; then it is built twice, which is only slower

File = tuple[str, int, int, str]
"""Name from the table's folder, bytes, time of change in ns, kind."""

Progress = Callable[[int, int], None]
"""Called with the rows done and the rows in all, from any thread, one call at a time."""


@dataclass
class Index:
    """What is known of the rows of one file."""

    seconds: NDArray[np.float64]  # 0 where there is a problem
    problems: dict[int, str] = field(default_factory=dict)  # row → why it cannot be read
    unsettled: set[int] = field(default_factory=set)  # the problem is in a file of its own
    kinds: Counter[str] = field(default_factory=Counter)  # "FLAC 16000 Hz" → clips
    decoded: bool = False  # bodies were looked at too, not only headers
    files: dict[int, File] = field(default_factory=dict)  # of readable clips with one of their own

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
        return cls(
            np.array(saved["seconds"], np.float64),
            {int(row): why for row, why in saved["problems"].items()},
            set(saved["unsettled"]),
            Counter(saved["kinds"]),
            saved["decoded"],
            {
                int(row): (str(name), int(size), int(time_ns), str(kind))
                for row, (name, size, time_ns, kind) in saved["files"].items()
            },
        )

    def take(self, rows: NDArray[np.int64], part: Index) -> None:
        """What was found out about some of the rows."""
        self.seconds[rows] = part.seconds
        self.problems |= {int(rows[i]): why for i, why in part.problems.items()}
        self.unsettled |= {int(rows[i]) for i in part.unsettled}
        self.files |= {int(rows[i]): file for i, file in part.files.items()}
        self.kinds += part.kinds

    def forget(self, rows: set[int]) -> None:
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

    `decode` looks at every clip's body too: what breaks there is a problem from then on.
    """
    tables = [open_table(path, audio_column, text_column) for path in paths]
    return index_tables(tables, progress, decode)


def index_tables(
    tables: Sequence[AudioTable], progress: Progress | None = None, decode: bool = False
) -> list[Index]:
    """Files side by side, and row groups within them, by threads.

    Threads are enough: reading parquet and libsndfile leave the interpreter free, and the headers
    that are read in Python take microseconds. Every process begins with another file, so that those
    who come together share the work.
    """
    tally = _Tally(sum(table.rows for table in tables), progress or _log_tenths())
    room = _Room(ROOM_BYTES)
    order = np.roll(np.arange(len(tables)), os.getpid()).tolist()
    threads = min(16, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as files, ThreadPoolExecutor(threads) as groups:
        found = files.map(lambda i: _obtain(tables[i], decode, groups, tally, room), order)
        return [index for _, index in sorted(zip(order, found, strict=True), key=lambda p: p[0])]


class _Tally:
    """Rows done of all files, told to whoever wants to know."""

    def __init__(self, total: int, tell: Progress) -> None:
        self.total, self.done, self._tell, self._lock = total, 0, tell, threading.Lock()

    def add(self, rows: int) -> None:
        with self._lock:
            self.done += rows
            self._tell(self.done, self.total)


class _Room:
    """So many bytes for all threads together; one that wants more than all of them goes alone."""

    def __init__(self, size: int) -> None:
        self.size, self.taken, self._change = size, 0, threading.Condition()

    @contextlib.contextmanager
    def take(self, size: int) -> Iterator[None]:
        with self._change:
            self._change.wait_for(lambda: not self.taken or self.taken + size <= self.size)
            self.taken += size
        try:
            yield
        finally:
            with self._change:
                self.taken -= size
                self._change.notify_all()


def _log_tenths() -> Progress:
    begun, last = time.monotonic(), 0

    def tell(done: int, total: int) -> None:
        nonlocal last
        tenth = 10 * done // max(total, 1)
        if tenth > last and time.monotonic() - begun > 1.0:  # nothing to say of what was kept
            log.info("indexed the durations of %d of %d clips (%d %%)", done, total, 10 * tenth)
        last = tenth

    return tell


def _obtain(
    table: AudioTable, decode: bool, pool: ThreadPoolExecutor, tally: _Tally, room: _Room
) -> Index:
    deadline, pause = time.monotonic() + PATIENCE_S, POLL_S
    while True:
        index = _kept(table, decode)
        if index is not None and not _stale(index, table, pool):
            tally.add(table.rows)
            return index
        with lock(table.path) as ours:
            if ours or time.monotonic() > deadline:
                return _build(table, decode, pool, tally, room)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_POLL_S)


def _stale(index: Index, table: AudioTable, pool: ThreadPoolExecutor) -> set[int]:
    """Rows to look at again: those whose file could not be read, or has changed since."""
    folder, files = str(table.path.parent), list(index.files.items())

    def changed(start: int) -> set[int]:
        part = files[start : start + FILES_AT_A_TIME]
        return {
            row for row, (name, *was, _) in part if _state(os.path.join(folder, name)) != tuple(was)
        }

    return index.unsettled.union(*pool.map(changed, range(0, len(files), FILES_AT_A_TIME)))


def _build(
    table: AudioTable, decode: bool, pool: ThreadPoolExecutor, tally: _Tally, room: _Room
) -> Index:
    of = stamp(table.path, table.column)
    index = _kept(table, decode)  # another process may have been faster
    rows = np.arange(table.rows)
    if index is None:
        index, before = Index(np.zeros(table.rows), decoded=decode), None
    else:
        before, stale = index.to_json(), _stale(index, table, pool)
        rows = np.array(sorted(stale), np.int64)
        index.forget(stale)
    tally.add(table.rows - len(rows))
    inside = np.split(rows, np.searchsorted(rows, table.starts[1:]))

    def look(group: int) -> Index:
        mine = inside[group]
        if not len(mine):
            return Index(np.zeros(0))
        with room.take(int(table.sizes[group])):
            try:
                part = measure(table.read(group), mine - table.starts[group], index.decoded)
            except DataError as error:  # none of the group can be read, this time
                why, everyone = str(error), range(len(mine))
                part = Index(np.zeros(len(mine)), dict.fromkeys(everyone, why), set(everyone))
        tally.add(len(mine))
        return part

    for group, part in enumerate(pool.map(look, range(len(table.starts)))):
        index.take(inside[group], part)
    if index.to_json() != before:
        save_index(table.path, of, index.to_json())
    return index


def _kept(table: AudioTable, decode: bool) -> Index | None:
    saved = load_index(table.path, table.column)
    try:
        index = Index.from_json(saved)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    fits = len(index.seconds) == table.rows and index.decoded >= decode
    return index if fits else None
