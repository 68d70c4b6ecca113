"""An embedded corpus as parquet shards in a folder, for inspection."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from muster.data import corpus
from muster.errors import DataError

ROWS_PER_GROUP = 64


def write_shards(spec: str, folder: Path, shards: int = 10) -> list[Path]:
    """Write `spec` (`embedded:NAME`) to `folder`: the training data in `shards` files of nearly
    equal size, validation and test in one each. Returns all of them.

    Files that are there already stay as they are. Each is written atomically, and of several concurrent
    processes only one writes.
    """
    source = corpus.embedded_folder(spec.removeprefix(corpus.EMBEDDED))
    names = [f"train-{n:05d}-of-{shards:05d}.parquet" for n in range(shards)]
    _, assigned = corpus.find(spec, "data.train", "speech")
    others = [path for path, split in assigned.of.items() if split != "train"]
    wanted = [folder / name for name in (*names, *(path.name for path in others))]
    unexpected = sorted(set(folder.glob("*.parquet")) - set(wanted))
    if unexpected:
        raise DataError(
            f"{folder} holds {unexpected[0].name}, which is not one of its {len(wanted)} files; move "
            "it to a folder of its own and name that with data.train"
        )
    if all(path.is_file() for path in wanted):
        return wanted
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks: written twice
                fcntl.flock(lock, fcntl.LOCK_EX)
            train = [pq.read_table(path) for path in sorted(source.glob("train-*.parquet"))]
            tables = _cut(pa.concat_tables(train), shards) + [pq.read_table(p) for p in others]
            for path, table in zip(wanted, tables, strict=True):
                if not path.is_file():
                    _write(path, table)
    except OSError as error:
        raise DataError(
            f"cannot write the shards of {spec} to {folder} ({error.strerror or error}); free some "
            f"space, or train on data.train={spec}"
        ) from None
    return wanted


def _cut(table: pa.Table, pieces: int) -> list[pa.Table]:
    ends = [len(table) * n // pieces for n in range(pieces + 1)]
    return [table.slice(begin, end - begin) for begin, end in itertools.pairwise(ends)]


def _write(path: Path, table: pa.Table) -> None:
    partial = path.with_name(f".{path.name}.partial")
    pq.write_table(table, partial, row_group_size=ROWS_PER_GROUP, compression="none")
    os.replace(partial, path)
