"""Clips and parquet files, made where a test wants them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile

RATE = 16000
AUDIO = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def tone(seconds: float, hertz: float = 440.0, rate: int = RATE) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def encode(samples: np.ndarray, rate: int = RATE, container: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=container)
    return file.getvalue()


def write_parquet(
    path: Path,
    clips: Sequence[Any],
    texts: Sequence[str | None],
    kind: pa.DataType = AUDIO,
    rows_per_group: int = 3,
) -> Path:
    """Columns audio and text; `clips` are bytes, which a struct wraps, or whatever `kind` holds."""
    if kind == AUDIO:
        clips = [{"bytes": c, "path": None} if isinstance(c, bytes) else c for c in clips]
    table = pa.table({"audio": pa.array(clips, kind), "text": pa.array(texts, pa.string())})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=rows_per_group)
    return path
