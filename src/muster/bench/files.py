"""Where figures are saved: a folder that cannot be written is refused by name."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from muster.errors import LaunchError
from muster.writing import write_json

Document = dict[str, Any]  # JSON: what was measured, and how


def prepare(folder: Path) -> None:
    """Refuse a folder that cannot be written, before measuring."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            probe.write(bytes(4096))
    except OSError as error:
        why = "is a file" if isinstance(error, FileExistsError) else error.strerror
        raise LaunchError(f"--dir {folder}: {why}; name a folder that can be written") from None


def write(path: Path, document: Document) -> None:
    try:
        write_json(path, document)
    except OSError as error:
        raise LaunchError(
            f"{path}: {error.strerror}; name another folder with --dir, or free some space"
        ) from None
