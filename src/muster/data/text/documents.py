"""Text for language models, one document at a time: parquet, JSON lines, plain files.

Documents are streamed, so a corpus may be larger than memory. A row without usable text is skipped
and counted; `Problems.check` raises if there are too many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from muster.data.parquet import (
    DAMAGED,
    TEXT_NAMES,
    first_line,
    holds_text,
    open_parquet,
    pick_column,
)
from muster.data.problems import Problems
from muster.errors import DataError, UnreadableError
from muster.reading import json_file
from muster.reading.files import open_file, read_bytes

LARGEST = 2**36  # bytes of a document

ROWS_AT_A_TIME = 256


@dataclass(frozen=True)
class Document:
    file: int  # which of the paths
    row: int  # counted from 0; always 0 for a plain file
    text: str


def count_rows(path: Path) -> int:
    """What `read_documents` and `read_conversations` go through: rows, lines, or one document."""
    if path.suffix == ".parquet":
        with open_parquet(path) as reader:
            return int(reader.metadata.num_rows)
    if path.suffix != ".jsonl":
        return 1
    with open_file(path) as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def row_name(path: Path, row: int) -> str:
    """`/data/train-00003.parquet row 17`, for messages."""
    return f"{path} row {row}" if path.suffix in (".parquet", ".jsonl") else str(path)


def read_documents(
    paths: Sequence[Path], text_column: str | None, bad: Problems
) -> Iterator[Document]:
    """Every document of `paths`, in order. Empty ones are included; unreadable ones go to `bad`."""
    for file, path in enumerate(paths):
        for row, cell in _cells(path, text_column):
            try:
                yield Document(file, row, _text(cell))
            except ValueError as error:
                bad.add(row_name(path, row), str(error), str(path))


def _cells(path: Path, text_column: str | None) -> Iterator[tuple[int, Any]]:
    """Rows and what is found there: a string, bytes to decode, or the reason why there is none."""
    try:
        if path.suffix == ".parquet":
            yield from _parquet_cells(path, text_column)
        elif path.suffix == ".jsonl":
            yield from _json_cells(path, text_column)
        else:
            yield 0, read_bytes(path, LARGEST)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror or first_line(error)}); copy it again"
        ) from None


def _parquet_cells(path: Path, text_column: str | None) -> Iterator[tuple[int, Any]]:
    with open_parquet(path) as reader:
        column = pick_column(path, reader.schema_arrow, text_column, TEXT_NAMES, holds_text, "text")
        row = 0
        try:
            for batch in reader.iter_batches(ROWS_AT_A_TIME, columns=[column]):
                cells = batch.column(0)
                for cell in cells.cast(pa.large_binary()).to_pylist():
                    yield row, ValueError("the text is null") if cell is None else cell
                    row += 1
        except DAMAGED as error:
            raise DataError(
                f"{path}, column {column}, from row {row}: {first_line(error)}; repair the file, or remove it "
                "from the data"
            ) from None


def _json_cells(path: Path, text_column: str | None) -> Iterator[tuple[int, Any]]:
    names = (text_column,) if text_column else TEXT_NAMES
    with open_file(path) as lines:
        for row, line in enumerate(lines):
            if line.strip():
                yield row, _json_cell(line, names)


def json_line(line: bytes) -> dict[str, Any] | ValueError:
    """Its object, or why it has none."""
    try:
        document = json_file.parse_value(line, "the line")
    except UnreadableError as error:
        reason = str(error).partition(": ")[2].removeprefix("not valid JSON: ")
        problem = "the text is not UTF-8" if "half of a character" in reason else "no valid JSON"
        return ValueError(f"{problem} ({reason})")
    return document if isinstance(document, dict) else ValueError("the line holds no JSON object")


def _json_cell(line: bytes, names: Sequence[str]) -> Any:
    document = json_line(line)
    if isinstance(document, ValueError):
        return document
    texts = (document[name] for name in names if isinstance(document.get(name), str))
    return next(texts, ValueError(f"no text under {' or '.join(names)}"))


def _text(cell: Any) -> str:
    if isinstance(cell, ValueError):
        raise cell
    try:
        if isinstance(cell, bytes):
            return cell.decode()
        cell.encode()  # JSON can spell half of a surrogate pair, which is no character
        return str(cell)
    except UnicodeError as error:
        raise ValueError(f"the text is not UTF-8 ({error})") from None
