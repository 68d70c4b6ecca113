"""What is made once and kept: indexes beside the data, tokens in the user's cache, and the locks
under which one process makes them while the others wait. A lock dies with its process."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

INDEX_VERSION = 3


def cache_folder() -> Path:
    """Where muster keeps what it can make again."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if not cache.is_absolute():  # a user without a home
        cache = Path(tempfile.gettempdir())
    return cache / "muster"


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process at a time, the others waiting; a lock dies with its process."""
    locks = cache_folder() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / folder.name).open("a") as file:
        with contextlib.suppress(
            OSError
        ):  # a file system without locks: made twice, which is only slower
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def lock(path: Path) -> Iterator[bool]:
    """Whether this process may build the index of `path`; where nothing can be locked, it may: an
    index is replaced whole, so that two who build it do no harm."""
    for place in places(path):
        file = place.with_name(f".{place.name}.lock")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        except OSError:
            continue
        ours = take(descriptor, file)
        try:
            yield ours
        finally:
            if ours:
                file.unlink(missing_ok=True)
            os.close(descriptor)
        return
    yield True


def take(descriptor: int, file: Path) -> bool:
    """Lock it, unless another process holds it or held and removed it meanwhile."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(descriptor).st_ino == file.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:  # a file system without locks
        return True


def places(path: Path) -> list[Path]:
    """Beside the data first; else in the user's cache, under a name made of the full path."""
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    beside = path.parent / ".muster-index" / f"{path.name}.json"
    elsewhere = cache_folder() / "index" / f"{path.stem}-{digest}.json"
    embedded = Path(__file__).resolve().parent.parent in path.resolve().parents
    # In a container one is root and may write anywhere; a folder without any write bit says no.
    closed = path.parent.is_dir() and not path.parent.stat().st_mode & 0o222
    return [elsewhere] if embedded or closed else [beside, elsewhere]


def stamp(path: Path, column: str) -> dict[str, Any]:
    """What a file is known by; taken before it is read, lest it be replaced meanwhile."""
    stat = path.stat()
    return {
        "version": INDEX_VERSION,
        "bytes": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "column": column,
    }


def load_index(path: Path, column: str) -> Any:
    """What was saved of this column, if the file is still the same; else None."""
    for place in places(path):
        try:
            document = json.loads(place.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(document, dict) and document.get("of") == stamp(path, column):
            return document.get("clips")
    return None


def save_index(path: Path, of: dict[str, Any], clips: Any) -> None:
    for place in places(path):
        temporary = place.with_name(f".{place.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"of": of, "clips": clips}))
            os.replace(temporary, place)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            continue
        return
    log.warning(
        "could not keep the index of %s: neither beside it nor in the cache is writable", path
    )
