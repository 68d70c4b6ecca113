"""Parquet shards from a folder of audio with a metadata file."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from muster.data import audio
from muster.data.corpus import Split
from muster.errors import DataError

Rows = list[tuple[int, dict[str, Any]]]  # with the line each ends on
METADATA = ("metadata.csv", "metadata.jsonl")
FILE_KEYS = ("file_name", "file", "path", "audio")
TEXT_KEYS = ("text", "sentence", "transcription", "transcript")
ROWS_PER_GROUP = 64
SCHEMA = pa.schema(
    [
        ("audio", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        ("text", pa.string()),
        ("duration", pa.float64()),
    ]
)


def read_metadata(folder: Path) -> list[tuple[Path, str]]:
    """(audio file, text) of every row of `metadata.csv` or `metadata.jsonl`."""
    found = [folder / name for name in METADATA if (folder / name).is_file()]
    if not found:
        raise DataError(
            f"{folder} has no {' or '.join(METADATA)}; write one with a row per clip, "
            "columns file_name and text"
        )
    path = found[0]
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets write a mark first
            rows = _csv(file) if path.suffix == ".csv" else _jsonl(file, path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from None
    if not rows:
        raise DataError(f"{path} has no rows")
    first = rows[0][1]
    names, texts = _key(first, FILE_KEYS, path), _key(first, TEXT_KEYS, path)
    for number, row in rows:
        for key in (names, texts):
            if not isinstance(row.get(key), str):
                raise DataError(
                    f"{path}, line {number}: {key} is {row.get(key)!r}, expected a string"
                )
    return [(folder / row[names], row[texts]) for _, row in rows]


def _csv(file: IO[str]) -> Rows:
    reader = csv.DictReader(file)
    return [(reader.line_num, row) for row in reader]


def _jsonl(file: IO[str], path: Path) -> Rows:
    rows = []
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            rows.append((number, dict(json.loads(line))))
        except (ValueError, TypeError):
            raise DataError(f"{path}, line {number}: not a JSON object") from None
    return rows


def _key(row: dict[str, Any], wanted: tuple[str, ...], path: Path) -> str:
    for key in wanted:
        if key in row:
            return key
    raise DataError(f"{path} has none of the columns {', '.join(wanted)}; it has {', '.join(row)}")


def make(folder: Path, out: Path, split: Split, shard_mb: float) -> list[Path]:
    """Write `<split>-00000-of-0000N.parquet` to `out`. Every clip is checked before anything is written."""
    rows = read_metadata(folder)
    taken = sorted(out.glob(f"{split}-*.parquet"))
    if taken:
        raise DataError(
            f"{out} already has {taken[0].name}; choose another folder or --split, or delete it"
        )
    problems, lengths = [], []
    for path, _ in rows:
        try:
            lengths.append(audio.seconds(path) if path.is_file() else 0.0)
            if not lengths[-1]:
                problems.append(
                    f"{path.name}: {'zero length' if path.is_file() else 'no such file'}"
                )
        except DataError as error:
            problems.append(f"{path.name}: {error}")
    if problems:
        raise DataError(
            f"{len(problems)} of {len(rows)} clips cannot be used, nothing was written: {'; '.join(problems[:5])}"
        )
    shards = list(_shards(rows, lengths, int(shard_mb * 1e6)))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot make the folder {out} ({error.strerror})") from None
    names = [f"{split}-{n:05d}-of-{len(shards):05d}" for n in range(len(shards))]
    partial = [out / f"{name}.partial" for name in names]
    try:
        for path, shard in zip(partial, shards, strict=True):
            _write_shard(path, shard)
    except OSError as error:
        for path in partial:
            path.unlink(missing_ok=True)
        raise DataError(f"could not write to {out} ({error}); nothing was kept") from None
    return [path.rename(path.with_suffix(".parquet")) for path in partial]


def _write_shard(target: Path, shard: list[tuple[Path, str, float]]) -> None:
    records = [
        {"audio": {"bytes": clip.read_bytes(), "path": clip.name}, "text": text, "duration": length}
        for clip, text, length in shard
    ]
    pq.write_table(pa.Table.from_pylist(records, SCHEMA), target, row_group_size=ROWS_PER_GROUP)


def _shards(
    rows: list[tuple[Path, str]], lengths: list[float], limit: int
) -> Iterator[list[tuple[Path, str, float]]]:
    shard: list[tuple[Path, str, float]] = []
    size = 0
    for (path, text), length in zip(rows, lengths, strict=True):
        clip = path.stat().st_size
        if shard and size + clip > limit:
            yield shard
            shard, size = [], 0
        shard.append((path, text, length))
        size += clip
    yield shard
