"""All clips of some files: what they say and how long they are in memory, their audio on demand."""

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

from muster.data.audio import Clip
from muster.data.index import Progress, index_tables, open_table
from muster.data.parquet import ROW_GROUP_CACHE_BYTES, Cells
from muster.errors import DataError

Key = tuple[int, int]  # file and row group


@dataclass(frozen=True)
class Row:
    """Where a clip is, what it says and how long it is."""

    file: int
    number: int
    text: str
    seconds: float
    problem: str | None


class Texts(Sequence[str]):
    """Strings in Arrow's memory: a million of them as objects would take ten times the room."""

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
class Rows(Sequence[Row]):
    """Rows in columns."""

    file: NDArray[np.int32]
    number: NDArray[np.int64]
    seconds: NDArray[np.float64]
    texts: Texts
    problems: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.number)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        i = range(len(self))[index]
        return Row(
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

    Different groups are read at the same time; a group that several threads want is read once.
    """

    def __init__(self, read: Callable[[Key], Cells], budget: int) -> None:
        self.budget = budget
        self.reads: Counter[Key] = Counter()
        self._read = read
        self._kept: OrderedDict[Key, _Entry] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Key) -> Cells:
        with self._lock:
            entry = self._kept.setdefault(key, _Entry())
            self._kept.move_to_end(key)
        with entry.lock:
            if entry.cells is None:
                entry.cells = self._read(key)
                with self._lock:
                    self.reads[key] += 1
                    self._bytes += entry.cells.nbytes
                    self._shrink(key)
            return entry.cells

    def _shrink(self, but: Key) -> None:
        for key in list(self._kept):
            if self._bytes <= self.budget:
                return
            cells = self._kept[key].cells
            if cells is not None and key != but:
                del self._kept[key]
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
            edges = [*table.starts.tolist(), table.rows]
            for group, why in damaged.items():
                index.problems |= dict.fromkeys(range(edges[group], edges[group + 1]), why)
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

    def clip(self, row: Row) -> Clip:
        starts = self.tables[row.file].starts
        group = int(np.searchsorted(starts, row.number, side="right")) - 1
        cells = self.row_groups.get((row.file, group))
        return cells.clip(row.number - int(starts[group]))

    def name(self, row: Row) -> str:
        return self.tables[row.file].name(row.number)

    def groups(self, rows: Rows) -> NDArray[np.int64] | None:
        """The row group of each row, numbered through all files; a clip in a file of its own is a
        group of its own, and where all are, their order costs nothing: None."""
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
        """Room for the row groups that two stretches of so many rows lie in: the stretch in use and
        the one prepared ahead."""
        sizes = np.concatenate([table.sizes for table in self.tables])
        rows = sum(table.rows for table in self.tables)
        stretch = samples * sizes.sum() / rows + sizes.max(initial=0)
        self.row_groups.budget = max(self.row_groups.budget, round(2 * stretch))
