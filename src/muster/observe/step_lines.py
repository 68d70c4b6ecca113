"""The .jsonl files with a line per optimizer step, as they are written: metrics.jsonl keeps every step,
ranks/<r>.jsonl at most `MOST_LINES`. A run of a million steps has 400 MB of metrics: nothing here reads a
file into memory.

The rule for ranks/<r>.jsonl: with `MOST_LINES` lines, it keeps its newest `NEWEST` and of the steps before
them every 2nd, 4th, 8th …, as many as are at most half of `MOST_LINES`.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from muster.writing import make_folder, open_own, temporary, write

MOST_LINES = 20_000
NEWEST = 1_000
FLUSHES_PER_S = 1024  # of all ranks' files together: each is on shared storage
BLOCK = 2**20  # bytes
STEP = re.compile(rb'\{"step": (\d+)[,}]')


def append_after(path: Path, start: int) -> IO[str]:
    """Open for appending, without the lines of steps after `start`, which will be repeated, and without
    lines cut short when their process was killed. The file is another one if any goes: whoever reads it
    as it grows begins again."""
    make_folder(path.parent)
    if path.exists():
        with path.open("rb") as file:
            good = _good_bytes(file, start)
            if good < os.fstat(file.fileno()).st_size:
                _copy_good(file, good, path, start)
    return open_own(path)


def _good_bytes(file: IO[bytes], start: int) -> int:
    """How far the file holds nothing but lines to keep."""
    good = 0
    for line in file:
        if not (line.endswith(b"\n") and _is_kept(line, start)):
            break
        good += len(line)
    return good


def _copy_good(file: IO[bytes], good: int, path: Path, start: int) -> None:
    with temporary(path) as part, part.open("wb") as target:
        file.seek(0)
        while left := good - file.tell():
            target.write(file.read(min(BLOCK, left)))
        kept = (line.removesuffix(b"\n") + b"\n" for line in file if _is_kept(line, start))
        target.writelines(kept)


def _is_kept(line: bytes, start: int) -> bool:
    found = STEP.match(line)
    if found and line.endswith(b"}\n") and line.count(b"{") == 1:  # whole, and nothing nested
        return int(found[1]) <= start
    try:
        return bool(json.loads(line)["step"] <= start)
    except (ValueError, KeyError, TypeError):
        return False


class RankLines:
    """ranks/<r>.jsonl of one rank of `ranks`."""

    def __init__(self, path: Path, start: int, rank: int, ranks: int) -> None:
        self.path = path
        self._file = append_after(path, start)
        with path.open("rb") as file:
            self._lines = sum(block.count(b"\n") for block in iter(lambda: file.read(BLOCK), b""))
        self._limit = MOST_LINES - 97 * rank % NEWEST  # not all ranks in the same step
        self._every_s, self._flushed = ranks / FLUSHES_PER_S, -1.0

    def write(self, line: Mapping[str, Any]) -> None:
        """`line` has its step first."""
        self._file.write(json.dumps(line) + "\n")
        self._lines += 1
        now = time.monotonic()
        if now - self._flushed >= self._every_s:
            self._flushed = now
            self._file.flush()
        if self._lines >= self._limit:
            self._thin()

    def _thin(self) -> None:
        self._file.flush()
        kept = thinned(self.path.read_bytes().splitlines(keepends=True))
        write(self.path, b"".join(kept))  # on a full disk, the file stays as it is
        self._file.close()
        self._file, self._lines = open_own(self.path), len(kept)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def thinned(lines: list[bytes]) -> list[bytes]:
    """By the rule above. A line without a step is left out."""
    old, stride = lines[:-NEWEST], 2
    steps = [int(found[1]) if (found := STEP.match(line)) else None for line in old]
    while sum(step is not None and step % stride == 0 for step in steps) > MOST_LINES // 2:
        stride *= 2
    kept = [line for line, n in zip(old, steps, strict=True) if n is not None and n % stride == 0]
    return kept + lines[-NEWEST:]
