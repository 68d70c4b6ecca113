"""Parquet files: which columns hold what, and the audio of one row group at a time.

Audio comes as encoded bytes or a file name, plain or in a struct, or as a list of samples with their
rate. Cells stay in Arrow memory until a clip is loaded.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from muster.data.speech.audio import Clip, Waveform
from muster.data.utf8 import in_utf8
from muster.errors import DataError
from muster.reading.text import in_one_line

# What Arrow raises for a damaged file; UnicodeError for a name that no text is
DAMAGED = (pa.ArrowException, OSError, UnicodeError, MemoryError)

AUDIO_NAMES = ("audio", "file", "path", "speech", "wav", "flac", "mp3", "samples", "array")
RATE_NAMES = ("sampling_rate", "sample_rate", "rate")
TEXT_NAMES = (
    "text",
    "sentence",
    "normalized_text",
    "transcript",
    "transcription",
    "raw_text",
    "cleaned_transcription",
)
ROW_GROUP_CACHE_BYTES = 256 << 20


class FileProblem(DataError):
    """A problem of an audio file that a cell names, which may be fixed without changing the table."""


class AudioTable(Protocol):
    """Rows of audio and text in one file, read a group of rows at a time, by any thread."""

    path: Path
    column: str  # of the audio
    layout: str  # the columns and their types, for display
    rows: int
    starts: NDArray[np.int64]  # the first row of each group …
    sizes: NDArray[np.int64]  # … and about how many bytes its audio takes in memory
    apart: bool  # clips are separate files, so that any order is equally fast

    def texts(self) -> tuple[pa.ChunkedArray, dict[int, str]]:
        """Of every row; and why some cannot be read, by row, whose texts are empty."""
        ...

    def read(self, group: int) -> Cells: ...
    def name(self, row: int) -> str: ...


@dataclass(frozen=True)
class Cells:
    """The audio column of some rows. Names of files start at `folder`."""

    audio: pa.ChunkedArray
    folder: Path
    rates: pa.ChunkedArray | None = None

    def __len__(self) -> int:
        return len(self.audio)

    @property
    def nbytes(self) -> int:
        return int(self.audio.nbytes)

    def clip(self, index: int) -> Clip:
        rate = None if self.rates is None else self.rates[index].as_py()
        return clip_of(self.audio[index], self.folder, rate)


class ParquetClips:
    """Clips in one parquet file.

    Opened for every read: readers are not thread-safe, and a corpus of thousands of files would run out
    of file descriptors.
    """

    def __init__(
        self, path: Path, audio_column: str | None = None, text_column: str | None = None
    ) -> None:
        self.path = path
        with open_parquet(path) as reader:
            schema, self._metadata = reader.schema_arrow, reader.metadata
            self.starts = np.array(group_starts(reader), np.int64)
        self.column, self._text = find_columns(path, schema, audio_column, text_column)
        self._rate = find_rate(path, schema, self.column)
        used = [name for name in (self.column, self._rate, self._text) if name]
        self.layout = ", ".join(f"{name} {schema.field(name).type}" for name in used)
        self.rows = self._metadata.num_rows
        self.sizes = np.array([self._bytes(g) for g in range(len(self.starts))], np.int64)
        self.apart = holds_text(schema.field(self.column).type)

    def name(self, row: int) -> str:
        """`train-00003.parquet row 17`, for messages."""
        return f"{self.path.name} row {row}"

    def texts(self) -> tuple[pa.ChunkedArray, dict[int, str]]:
        chunks: list[pa.Array] = []
        damaged: dict[int, str] = {}
        for group, rows in enumerate(np.diff(self.starts, append=self.rows).tolist()):
            start = int(self.starts[group])
            try:
                found = self._read(group, [self._text]).column(0).chunks
            except DataError as error:
                damaged |= dict.fromkeys(range(start, start + rows), str(error))
                found = [pa.array([""] * rows, pa.string())]
            for chunk in found:
                texts, bad = in_utf8(chunk)
                damaged |= {start + row: why for row, why in bad.items()}
                start += len(chunk)
                chunks.append(texts)
        return pa.chunked_array(chunks, pa.string()), damaged

    def read(self, group: int) -> Cells:
        wanted = [self.column] if self._rate is None else [self.column, self._rate]
        table = self._read(group, wanted)
        rates = None if self._rate is None else table.column(self._rate)
        return Cells(table.column(self.column), self.path.parent, rates)

    def _read(self, group: int, columns: list[str]) -> pa.Table:
        try:
            with pq.ParquetFile(self.path, metadata=self._metadata) as reader:
                table = reader.read_row_group(group, columns=columns, use_threads=False)
                return table.cast(_plain(table.schema))
        except DAMAGED as error:
            raise DataError(
                f"{self.path}, row group {group}, column {', '.join(columns)}: "
                f"{first_line(error)}; repair the file, or remove it from the data"
            ) from None

    def _bytes(self, group: int) -> int:
        part = self._metadata.row_group(group)
        columns = (part.column(i) for i in range(part.num_columns))
        return sum(
            c.total_uncompressed_size
            for c in columns
            if c.path_in_schema.split(".")[0] == self.column
        )


def _plain(schema: pa.Schema) -> pa.Schema:
    """Text columns cast to one type."""
    return pa.schema([f.with_type(pa.string()) if holds_text(f.type) else f for f in schema])


def open_parquet(path: Path) -> pq.ParquetFile:
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is not a file; name a parquet file")
    try:
        return pq.ParquetFile(path)
    except DAMAGED as error:
        raise DataError(
            f"{path} is not a readable parquet file ({first_line(error)}); copy it again"
        ) from None


def first_line(error: BaseException) -> str:
    """Of what Arrow says; it may add lines, or be empty."""
    return in_one_line(str(error).partition("\n")[0], 300) or type(error).__name__


def group_starts(reader: pq.ParquetFile) -> list[int]:
    starts, total = [], 0
    for group in range(reader.num_row_groups):
        starts.append(total)
        total += reader.metadata.row_group(group).num_rows
    return starts


def find_columns(
    path: Path, schema: pa.Schema, audio_column: str | None, text_column: str | None
) -> tuple[str, str]:
    """The audio and the text column, by the recipe's keys or by name and type.

    A column of audio is preferred to one of file names, which often do not exist.
    """
    inside = [n for n in AUDIO_NAMES if n in schema.names and not holds_text(schema.field(n).type)]
    return (
        pick_column(path, schema, audio_column, [*inside, *AUDIO_NAMES], _holds_audio, "audio"),
        pick_column(path, schema, text_column, TEXT_NAMES, holds_text, "text"),
    )


def find_rate(path: Path, schema: pa.Schema, audio_column: str) -> str | None:
    """The column with the sampling rate of plain samples; None where none is needed.

    The recipe's rate is not used: a wrong one would go unnoticed.
    """
    kind = schema.field(audio_column).type
    if pa.types.is_struct(kind):
        fields = {field.name for field in kind}
        if "array" not in fields or "sampling_rate" in fields:
            return None
    elif not _holds_samples(kind):
        return None
    for name in RATE_NAMES:
        if name in schema.names and pa.types.is_primitive(schema.field(name).type):
            return name
    raise DataError(
        f"{path}: {audio_column} holds plain samples, and no column says at which rate they were "
        f"taken; add a column {RATE_NAMES[0]} with Hz"
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
        return any(
            (field.name == "bytes" and is_binary(field.type))
            or (field.name == "path" and holds_text(field.type))
            or (field.name == "array" and _holds_samples(field.type))
            for field in kind
        )
    return is_binary(kind) or holds_text(kind) or _holds_samples(kind)


def _holds_samples(kind: pa.DataType) -> bool:
    types = pa.types
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return False
    value = kind.value_type
    return bool(types.is_floating(value) or types.is_int16(value) or types.is_int32(value))


def is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def holds_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def clip_of(cell: pa.Scalar, folder: Path, rate: float | None = None) -> Clip:
    """The sound in a cell, or the file it names. In a struct bytes are preferred to samples, and
    both to a path. `rate` is of plain samples."""
    parts = [cell]
    if isinstance(cell, pa.StructScalar) and cell.is_valid:
        fields = dict(cell.items())
        parts = [fields[name] for name in ("bytes", "array", "path") if name in fields]
        rate = fields["sampling_rate"].as_py() if "sampling_rate" in fields else rate
    for part in parts:
        if not part.is_valid:
            continue
        if pa.types.is_nested(part.type):
            if not isinstance(rate, int | float) or not math.isfinite(rate) or rate < 1:
                raise DataError(f"its sampling rate is {'missing' if rate is None else rate}")
            return Waveform(part.values.to_numpy(zero_copy_only=False), round(rate))
        if is_binary(part.type):
            if part.as_buffer().size:
                return memoryview(part.as_buffer())
        elif path := part.as_py():
            return _file(path, folder)
    raise DataError("the audio cell is empty")


def _file(path: str, folder: Path) -> Path:
    target = Path(path) if Path(path).is_absolute() else folder / path
    if not os.path.isfile(target):  # also where the name is too long to be one
        raise FileProblem(f"the audio file {path[:200]} does not exist")
    return target
