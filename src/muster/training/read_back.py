"""A checkpoint is read from the disk again before an older one is removed for it.

Between the memory that was saved and the medium there are caches, a network and a controller, and any of them
may lose or change a byte without an error. So the pages that the kernel still has are dropped first.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from muster.observe.results import MANIFEST
from muster.training.manifest import bytes_in

PIECE = 2**22  # bytes read at a time
SET_ASIDE = ".damaged"


def drop_cached(file: BinaryIO) -> None:
    """The kernel's copies of the file's pages, once they are on the disk: the next read comes from there. On
    network storage the server may still have its own. A file system that knows neither call is read all the same."""
    with suppress(OSError):
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def damaged(
    folder: Path, files: Mapping[str, Any], moved: Callable[[int], None] = lambda size: None
) -> list[str]:
    """Which of these files, and how, are not on the disk as they were written; `moved` is told the bytes that
    were read."""
    return [
        problem for name in sorted(files) if (problem := _problem(folder, name, files[name], moved))
    ]


def _problem(
    folder: Path, name: str, entry: Mapping[str, Any], moved: Callable[[int], None]
) -> str | None:
    read, size = hashlib.sha256(), 0
    try:
        with (folder / name).open("rb") as file:
            drop_cached(file)
            while piece := file.read(PIECE):
                read.update(piece)
                size += len(piece)
                moved(len(piece))
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    if size != entry["bytes"]:
        return f"{name} has {size} bytes, {entry['bytes']} were written"
    return None if read.hexdigest() == entry["sha256"] else f"{name} does not match its checksum"


def set_aside(folder: Path) -> str:
    """Under a name that no checkpoint has; one set aside earlier goes. Without its manifest first, so that whatever
    fails, it counts as incomplete. Returns what became of it; where a second copy would not fit, it goes."""
    (folder / MANIFEST).unlink(missing_ok=True)
    for earlier in folder.parent.glob(f"step-*{SET_ASIDE}"):
        shutil.rmtree(earlier, ignore_errors=True)
    if shutil.disk_usage(folder).free < bytes_in(folder):
        shutil.rmtree(folder, ignore_errors=True)
        return "it was removed"
    try:
        aside = folder.rename(folder.with_name(folder.name + SET_ASIDE))
    except OSError as error:
        return f"it could not be renamed ({error.strerror}) and counts as incomplete"
    return f"it was renamed to {aside.name}"
