from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clips import encode, tone, write_parquet


@pytest.fixture
def corpus_file(tmp_path: Path) -> Callable[..., Path]:
    """Seven clips of 0.2 s to 0.8 s in three row groups; the text of row 2 is "clip c"."""

    def make(name: str = "train.parquet", count: int = 7, **options: Any) -> Path:
        clips = [encode(tone(0.2 + 0.1 * i, 200 + 50 * i)) for i in range(count)]
        texts = [f"clip {'abcdefghijkl'[i]}" for i in range(count)]
        return write_parquet(tmp_path / "corpus" / name, clips, texts, **options)

    return make
