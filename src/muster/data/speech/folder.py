"""A folder of audio files with `metadata.csv` or `metadata.jsonl`, as Hugging Face's audiofolder.

One row per clip: `file_name`, relative to the metadata file, and the text.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from muster.data.corpus import MEDIA, METADATA
from muster.data.parquet import TEXT_NAMES, Cells
from muster.data.splits import claim
from muster.errors import DataError, UnreadableError
from muster.reading import json_file
from muster.reading.files import open_file
from muster.reading.text import in_one_line

LONGEST_NAME = 4096

Rows = list[tuple[int, dict[str, Any]]]  # with the line each ends on
FILE_NAMES = ("file_name", "file", "path", "audio")
ROWS_AT_A_TIME = 256


class FolderClips:
    """Clips that a metadata file names. Rows come in groups only so that threads can share them."""

    apart = True

    def __init__(
        self, path: Path, audio_column: str | None = None, text_column: str | None = None
    ) -> None:
        self.path = path
        self.column, text, rows = read_rows(path, audio_column, text_column)
        self._names = pa.array([row[self.column] for row in rows], pa.large_string())
        self._texts = pa.array([row[text] for row in rows], pa.string())
        self.layout = f"{path.name}: {self.column}, {text}"
        self.rows = len(rows)
        self.starts = np.arange(0, self.rows, ROWS_AT_A_TIME)
        self.sizes = np.zeros(len(self.starts), np.int64)

    def name(self, row: int) -> str:
        """`train/metadata.csv row 17 (wavs/17.flac)`, for messages."""
        return f"{self.path.parent.name}/{self.path.name} row {row} ({self._names[row]})"

    def texts(self) -> tuple[pa.ChunkedArray, dict[int, str]]:
        return pa.chunked_array([self._texts]), {}

    def unnamed(self) -> list[Path]:
        """Audio files beside those that rows name, which none does."""
        folder = self.path.parent
        named = {folder / name for name in self._names.to_pylist()}
        folders = {path.parent for path in named if path.parent.is_relative_to(folder)}
        found = (path for inner in folders if inner.is_dir() for path in inner.iterdir())
        return sorted(p for p in found if p.suffix.lower() in MEDIA and p not in named)

    def read(self, group: int) -> Cells:
        part = self._names.slice(self.starts[group], ROWS_AT_A_TIME)
        return Cells(pa.chunked_array([part]), self.path.parent)


def read_metadata(folder: Path) -> list[tuple[Path, str]]:
    """(audio file, text) of every row of the folder's `metadata.csv` or `metadata.jsonl`."""
    found = [folder / name for name in METADATA if (folder / name).is_file()]
    if not found:
        raise DataError(
            f"{folder} has no {' or '.join(METADATA)}; write one with a row per clip, "
            "columns file_name and text"
        )
    name, text, rows = read_rows(found[0])
    return [(folder / row[name], row[text]) for row in rows]


def read_rows(
    path: Path, audio_column: str | None = None, text_column: str | None = None
) -> tuple[str, str, list[dict[str, Any]]]:
    """The names of the columns with files and texts, and the rows."""
    try:
        # Spreadsheets write a mark first.
        with io.TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="") as file:
            rows = _csv(file, path) if path.suffix == ".csv" else _jsonl(file, path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None
    if not rows:
        raise DataError(f"{path} has no rows")
    first = rows[0][1]
    name = _column(first, audio_column, FILE_NAMES, "audio", path)
    text = _column(first, text_column, TEXT_NAMES, "text", path)
    for number, row in rows:
        for key in (name, text):
            if not isinstance(row.get(key), str):
                has = in_one_line(repr(row.get(key)))
                raise DataError(f"{path}, line {number}: {key} is {has}, expected a string")
            if problem := _of_name(row[name]) if key == name else None:
                raise DataError(f"{path}, line {number}: {key} {problem}")
    _refuse_several_splits(path, {row[name] for _, row in rows})
    return name, text, [row for _, row in rows]


def _csv(file: IO[str], path: Path) -> Rows:
    reader = csv.DictReader(file)
    try:
        return [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from None


def _jsonl(file: IO[str], path: Path) -> Rows:
    rows = []
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            rows.append((number, json_file.parse(line, "it")))
        except UnreadableError as error:
            raise DataError(f"{path}, line {number}: not a JSON object ({error})") from None
    return rows


def _column(
    row: dict[str, Any], asked: str | None, known: tuple[str, ...], what: str, path: Path
) -> str:
    for key in (asked,) if asked else known:
        if key in row:
            return key
    key, has = f"data.{what}_column", in_one_line(", ".join(map(str, row)), 300)
    if asked:
        raise DataError(f"{key}: {path} has no column {asked!r}; it has {has}")
    raise DataError(
        f"{path} has none of the columns {', '.join(known)}; it has {has}; "
        f"rename one, or name it with {key}=…"
    )


def _of_name(name: str) -> str | None:
    """Why no file can have it; another row may still be right, but its table is not what it should be."""
    if not name or "\0" in name:
        return f"is {in_one_line(repr(name))}, which is no name of a file"
    return f"is a name of {len(name)} characters" if len(name) > LONGEST_NAME else None


def _refuse_several_splits(path: Path, names: set[str]) -> None:
    """Test clips must not be trained on because one file lists them all."""
    folders = {str(Path(name).parent) for name in names}
    splits = {found.split for folder in folders if (found := claim(Path(folder)))}
    if len(splits) > 1:
        raise DataError(
            f"{path} names files of several splits ({', '.join(sorted(splits))}); "
            f"put a {path.name} of its own into the folder of each"
        )
