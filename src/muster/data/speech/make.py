"""Parquet shards from a folder of audio with a metadata file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from muster.data.corpus import Split
from muster.data.speech import audio
from muster.data.speech.folder import read_metadata
from muster.errors import DataError

ROWS_PER_GROUP = 64
SCHEMA = pa.schema(
    [
        ("audio", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        ("text", pa.string()),
        ("duration", pa.float64()),
    ]
)


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
