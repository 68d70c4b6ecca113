"""One log per rank, each line with the rank in front."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from muster.writing import make_folder, open_own


def log_to_file(folder: Path, rank: int) -> None:
    """Redirect stdout and stderr to `ranks/<rank>.log`: logging, prints, and output of native code."""
    path = folder / "ranks" / f"{rank}.log"
    file = open_own(make_folder(path.parent) / path.name, buffering=1)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file.fileno(), sys.stdout.fileno())
    os.dup2(file.fileno(), sys.stderr.fileno())
    set_up(f"Rank {rank}")


def set_up(prefix: str, level: int = logging.INFO) -> None:
    logging.basicConfig(
        format=f"[{prefix}] %(message)s", level=level, stream=sys.stderr, force=True
    )
    logging.captureWarnings(True)
