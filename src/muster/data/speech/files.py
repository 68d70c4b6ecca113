"""All clips of some files: texts and durations in memory, audio on demand."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from muster.data.parquet import ROW_GROUP_CACHE_BYTES, Cells
from muster.data.progress import Progress
from muster.data.speech.audio import Clip
from muster.data.speech.index import index_tables, open_table
from muster.errors import DataError

Key = tuple[int, int]  # file and row group


@dataclass(frozen=True)
class ClipRow:
    """Position, text and duration of a clip."""

    file: int
    number: int
    text: str
    seconds: float
    problem: str | None


class Texts(Sequence[str]):
    """Strings in Arrow memory, a tenth of the size of Python objects."""

    def __init__(self, strings: pa.LargeStringArray) -> None:
        self.strings = strings

    def __len__(self) -> int:
        return len(self.strings)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return Texts(self.strings[index])
        return str(self.strings[int(index)].as_py())

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), 4096):
            yield from self.strings[start : start + 4096].to_pylist()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


@dataclass(frozen=True, eq=False)
class Rows(Sequence[ClipRow]):
    """Rows in columns."""

    file: NDArray[np.int32]
    number: NDArray[np.int64]
    seconds: NDArray[np.float64]
    texts: Texts
    problems: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.number)

    @overload
    def __getitem__(self, index: int) -> ClipRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ClipRow]: ...
    def __getitem__(self, index: int | slice) -> ClipRow | Sequence[ClipRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        i = range(len(self))[index]
        return ClipRow(
            int(self.file[i]),
            int(self.number[i]),
            self.texts[i],
            float(self.seconds[i]),
            self.problems.get(i),
        )

    def without_problems(self, wanted: NDArray[np.bool_]) -> Rows:
        """The wanted rows, none of which has a problem."""
        if wanted.all():
            return self
        texts = Texts(self.texts.strings.filter(pa.array(wanted)))
        return Rows(self.file[wanted], self.number[wanted], self.seconds[wanted], texts)


@dataclass
class _Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    cells: Cells | None = None


class RowGroups:
    """Row groups, the last used ones kept within `budget` bytes.

    Different groups are read at the same time; a group that several threads need is read once.
    """

    def __init__(self, read: Callable[[Key], Cells], budget: int) -> None:
        self.budget = budget
        self.reads: Counter[Key] = Counter()
        self._read = read
        self._cache: OrderedDict[Key, _Entry] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Key) -> Cells:
        with self._lock:
            entry = self._cache.setdefault(key, _Entry())
            self._cache.move_to_end(key)
        with entry.lock:
            if entry.cells is None:
                entry.cells = self._read(key)
                with self._lock:
                    self.reads[key] += 1
                    self._bytes += entry.cells.nbytes
                    self._shrink(key)
            return entry.cells

    def _shrink(self, keep: Key) -> None:
        for key in list(self._cache):
            if self._bytes <= self.budget:
                return
            cells = self._cache[key].cells
            if cells is not None and key != keep:
                del self._cache[key]
                self._bytes -= cells.nbytes


class AudioFiles:
    """Parquet files and metadata files, as one list of rows."""

    def __init__(
        self, paths: Sequence[Path], audio_column: str | None = None, text_column: str | None = None
    ) -> None:
        self.paths = list(paths)
        self.tables = [open_table(path, audio_column, text_column) for path in self.paths]
        self.row_groups = RowGroups(
            lambda key: self.tables[key[0]].read(key[1]), ROW_GROUP_CACHE_BYTES
        )
        self.kinds: Counter[str] = Counter()  # "FLAC 16000 Hz" → clips

    def read_rows(
        self,
        tidy: Callable[[str], str] = str,
        progress: Progress | None = None,
        decode: bool = False,
    ) -> Rows:
        """Every row, its text tidied. Durations come from the index, which is built if need be."""
        indexes = index_tables(self.tables, progress, decode)
        sizes = [table.rows for table in self.tables]
        if not sum(sizes):
            raise DataError(f"no rows in {', '.join(map(str, self.paths))}")
        self.kinds = sum((index.kinds for index in indexes), Counter())
        starts = np.cumsum([0, *sizes])
        tidied: list[pa.Array] = []
        for table, index in zip(self.tables, indexes, strict=True):
            texts, damaged = table.texts()
            tidied += [
                pa.array((tidy(text or "") for text in chunk.to_pylist()), pa.large_string())
                for chunk in texts.chunks
            ]
            index.problems |= damaged
        return Rows(
            np.repeat(np.arange(len(sizes), dtype=np.int32), sizes),
            np.concatenate([np.arange(size) for size in sizes]),
            np.concatenate([index.seconds for index in indexes]),
            Texts(pa.concat_arrays(tidied)),
            {
                int(start) + row: why
                for start, index in zip(starts, indexes, strict=False)
                for row, why in sorted(index.problems.items())
            },
        )

    def clip(self, row: ClipRow) -> Clip:
        starts = self.tables[row.file].starts
        group = int(np.searchsorted(starts, row.number, side="right")) - 1
        cells = self.row_groups.get((row.file, group))
        return cells.clip(row.number - int(starts[group]))

    def name(self, row: ClipRow) -> str:
        return self.tables[row.file].name(row.number)

    def groups(self, rows: Rows) -> NDArray[np.int64] | None:
        """The row group of each row, numbered through all files; a clip in a separate file is its
        own group; None where all are, since then any order is equally fast."""
        if all(table.apart for table in self.tables):
            return None
        numbers, first = np.empty(len(rows), np.int64), 0
        edges = np.searchsorted(rows.file, np.arange(len(self.tables) + 1))
        for table, (start, end) in zip(self.tables, pairwise(edges.tolist()), strict=True):
            inside = rows.number[start:end]
            if not table.apart:
                inside = np.searchsorted(table.starts, inside, side="right") - 1
            numbers[start:end] = first + inside
            first += table.rows if table.apart else len(table.starts)
        return numbers

    def reserve(self, samples: int) -> None:
        """Raise the cache budget to the row groups of two segments of `samples` rows: the current one and
        the prefetched one."""
        sizes = np.concatenate([table.sizes for table in self.tables])
        rows = sum(table.rows for table in self.tables)
        stretch = samples * sizes.sum() / rows + sizes.max(initial=0)
        self.row_groups.budget = max(self.row_groups.budget, round(2 * stretch))
