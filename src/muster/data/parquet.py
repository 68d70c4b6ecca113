"""Audio and text in parquet: which columns, how long each clip is, one row at a time.

Durations are not in most corpora, so they are read once from the audio headers into an index
beside the data (or in the user's cache where the data is read-only) and reused while the file's
size and time stay the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from muster.data import audio
from muster.errors import DataError

log = logging.getLogger(__name__)

AUDIO_NAMES = ("audio", "file", "path", "speech", "wav")
TEXT_NAMES = (
    "text",
    "sentence",
    "normalized_text",
    "transcript",
    "transcription",
    "raw_text",
    "cleaned_transcription",
)
INDEX_VERSION = 1
ROW_GROUP_CACHE_BYTES = 256 << 20


@dataclass(frozen=True)
class Row:
    """Where a clip is, what it says and how long it is."""

    file: int
    number: int
    text: str
    seconds: float
    problem: str | None


def open_parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is not a readable parquet file ({str(error).splitlines()[0]})"
        ) from None


def find_columns(
    path: Path, schema: pa.Schema, audio_column: str | None, text_column: str | None
) -> tuple[str, str]:
    """The audio and the text column, by the recipe's word or by name and type."""
    return (
        pick_column(path, schema, audio_column, AUDIO_NAMES, _holds_audio, "audio"),
        pick_column(path, schema, text_column, TEXT_NAMES, holds_text, "text"),
    )


def pick_column(
    path: Path, schema: pa.Schema, asked: str | None, names: Sequence[str], fits: Any, what: str
) -> str:
    key = f"data.{what}_column"
    columns = ", ".join(f"{f.name} ({f.type})" for f in schema)
    if asked is not None:
        if asked not in schema.names:
            raise DataError(f"{key}: {path} has no column {asked!r}; it has {columns}")
        if not fits(schema.field(asked).type):
            raise DataError(f"{key}: {asked!r} of {path} holds no {what}; it has {columns}")
        return asked
    for name in names:
        if name in schema.names and fits(schema.field(name).type):
            return name
    raise DataError(
        f"{path} has no {what} column muster knows; name it with {key}=…; it has {columns}"
    )


def _holds_audio(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(kind.field(i).name in ("bytes", "path") for i in range(kind.num_fields))
    return is_binary(kind) or holds_text(kind)


def is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def holds_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def clip_of(value: Any, folder: Path) -> bytes | Path:
    """The encoded bytes of a cell, or the file it names (relative names start at the parquet file)."""
    path: Any = value
    if isinstance(value, dict):
        if value.get("bytes"):
            return bytes(value["bytes"])
        path = value.get("path")
    if isinstance(path, bytes) and path:
        return path
    if not path:
        raise DataError("the audio cell is empty")
    target = Path(path) if Path(path).is_absolute() else folder / path
    if not os.path.isfile(target):  # also where the name is too long to be one
        raise DataError(f"the audio file {str(path)[:200]} does not exist")
    return target


class AudioFiles:
    """All rows of some parquet files: texts and durations in memory, audio on demand.

    Thread-safe: row groups are read under a lock and kept, newest first, within a fixed budget.
    """

    def __init__(
        self, paths: Sequence[Path], audio_column: str | None = None, text_column: str | None = None
    ) -> None:
        self.paths = list(paths)
        self._readers = [open_parquet(path) for path in paths]
        self._columns = [
            find_columns(path, reader.schema_arrow, audio_column, text_column)
            for path, reader in zip(self.paths, self._readers, strict=True)
        ]
        self._groups = [group_starts(reader) for reader in self._readers]
        self._cache: OrderedDict[tuple[int, int], pa.ChunkedArray] = OrderedDict()
        self._lock = threading.Lock()
        self.rows = [row for number in range(len(self.paths)) for row in self._index(number)]
        if not self.rows:
            raise DataError(f"no rows in {', '.join(map(str, self.paths))}")

    def clip(self, row: Row) -> bytes | Path:
        starts = self._groups[row.file]
        group = max(g for g, start in enumerate(starts) if start <= row.number)
        with self._lock:
            column = self._group(row.file, group)
        return clip_of(column[row.number - starts[group]].as_py(), self.paths[row.file].parent)

    def _group(self, file: int, group: int) -> pa.ChunkedArray:
        key = (file, group)
        if key not in self._cache:
            self._cache[key] = self._read(file, group, self._columns[file][0])
            while (
                sum(c.nbytes for c in self._cache.values()) > ROW_GROUP_CACHE_BYTES
                and len(self._cache) > 1
            ):
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return self._cache[key]

    def _read(self, file: int, group: int, column: str) -> pa.ChunkedArray:
        try:
            return self._readers[file].read_row_group(group, columns=[column]).column(0)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{self.paths[file]}, row group {group}, column {column}: "
                f"{str(error).splitlines()[0]}"
            ) from None

    def _index(self, file: int) -> list[Row]:
        path, (audio_column, text_column) = self.paths[file], self._columns[file]
        texts: list[str | None] = []
        for group in range(self._readers[file].num_row_groups):
            texts += self._read(file, group, text_column).to_pylist()
        spans = load_index(path, audio_column)
        if spans is None:
            spans, lasting = self._measure(file)
            if lasting:
                save_index(path, audio_column, spans)
        return [
            Row(file, i, text or "", span or 0.0, problem)
            for i, (text, (span, problem)) in enumerate(zip(texts, spans, strict=True))
        ]

    def _measure(self, file: int) -> tuple[list[tuple[float | None, str | None]], bool]:
        """Seconds or a problem of every row, and whether that holds as long as the file stays the
        same: a named audio file that is missing or broken may be mended without touching it."""
        path = self.paths[file]
        lasting = True
        log.info(
            "indexing durations of %s (%d rows)", path.name, self._readers[file].metadata.num_rows
        )

        def measure(value: Any) -> tuple[float | None, str | None]:
            nonlocal lasting
            clip: bytes | Path | None = None
            try:
                clip = clip_of(value, path.parent)
                span = audio.seconds(clip)
                if span > 0:
                    return span, None
                problem = "the clip has zero length"
            except DataError as error:
                problem = str(error)
            lasting = lasting and isinstance(clip, bytes)
            return None, problem

        spans: list[tuple[float | None, str | None]] = []
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for group in range(self._readers[file].num_row_groups):
                spans += pool.map(measure, self._group(file, group).to_pylist())
        return spans, lasting


def group_starts(reader: pq.ParquetFile) -> list[int]:
    starts, total = [], 0
    for group in range(reader.num_row_groups):
        starts.append(total)
        total += reader.metadata.row_group(group).num_rows
    return starts


def _index_places(path: Path) -> list[Path]:
    """Beside the data first; else in the user's cache, under a name made of the full path."""
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if not cache.is_absolute():  # a user without a home
        cache = Path(tempfile.gettempdir())
    beside = path.parent / ".muster-index" / f"{path.name}.json"
    elsewhere = cache / "muster" / "index" / f"{path.stem}-{digest}.json"
    embedded = Path(__file__).resolve().parent.parent in path.resolve().parents
    return [elsewhere] if embedded else [beside, elsewhere]


def _stamp(path: Path, column: str) -> dict[str, Any]:
    stat = path.stat()
    return {
        "version": INDEX_VERSION,
        "bytes": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "column": column,
    }


def load_index(path: Path, column: str) -> list[tuple[float | None, str | None]] | None:
    for place in _index_places(path):
        try:
            document = json.loads(place.read_text())
        except (OSError, ValueError):
            continue
        if document.get("of") == _stamp(path, column):
            return [(span, problem) for span, problem in document["clips"]]
    return None


def save_index(path: Path, column: str, spans: list[tuple[float | None, str | None]]) -> None:
    for place in _index_places(path):
        temporary = place.with_name(f".{place.name}.{os.getpid()}")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"of": _stamp(path, column), "clips": spans}))
            os.replace(temporary, place)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            continue
        return
    log.warning(
        "could not keep the index of %s: neither beside it nor in the cache is writable", path
    )
