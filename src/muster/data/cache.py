"""Cached files: indexes beside the data, tokens in the user's cache, and the file locks under which one
process builds them while the others wait. A lock is released when its process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from muster.errors import DataError
from muster.reading import json_file
from muster.writing import open_own, write

log = logging.getLogger(__name__)

LARGEST_INDEX = 2**31  # bytes
INDEX_VERSION = 3
BESIDE = ".muster-index"  # in the folder of the data


def cache_folder() -> Path:
    """Folder for files that can be rebuilt."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if not cache.is_absolute():  # a user without a home
        cache = Path(tempfile.gettempdir())
    return cache / "muster"


@contextlib.contextmanager
def exclusive_lock(folder: Path) -> Iterator[bool]:
    """One process at a time, the others wait; released when the process ends. False on a file system without
    locks, where several may be inside."""
    locks = cache_folder() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with open_own(locks / folder.name) as file:
        held = False
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
            held = True
        yield held


Loaded = TypeVar("Loaded")


def load_or_build(
    folder: Path, load: Callable[[Path], Loaded | None], build: Callable[[Path], None], what: str
) -> Loaded:
    """What `load` finds in a folder of the cache; where there is nothing, `build` fills it first.

    Under a temporary name: the folder that counts is whole or not there. `what` is built, for messages.
    """
    found = load(folder)
    if found is None:
        try:
            with exclusive_lock(folder):
                if load(folder) is None:
                    log.info("building %s in %s", what, folder)
                    _build(folder, load, build)
        except OSError as error:
            raise DataError(
                f"cannot write {what} to {folder} ({error.strerror}); free some space, or set "
                "XDG_CACHE_HOME to a folder that has it"
            ) from None
        found = load(folder)
    if found is None:
        raise DataError(f"{what} in {folder} cannot be read; remove that folder and start again")
    return found


def _build(
    folder: Path, load: Callable[[Path], Loaded | None], build: Callable[[Path], None]
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        build(temporary)
        if load(folder) is None:  # else another machine that shares the cache was faster
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(temporary, folder)
    except OSError:
        if load(folder) is None:
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[bool]:
    """Whether this process may build the index of `path`. True where nothing can be locked: an index is
    replaced atomically, so building it twice is safe."""
    for target in index_paths(path):
        file = target.with_name(f".{target.name}.lock")
        try:
            _make_own(file.parent)
            flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(file, flags, 0o666)
        except OSError:
            continue
        acquired = try_lock(descriptor, file)
        try:
            yield acquired
        finally:
            if acquired:
                file.unlink(missing_ok=True)
            os.close(descriptor)
        return
    yield True


def try_lock(descriptor: int, file: Path) -> bool:
    """flock without waiting; False if another process holds the lock, or has removed the file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(descriptor).st_ino == file.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:  # a file system without locks
        return True


def _make_own(folder: Path) -> None:
    """The folder of indexes, which is made in a folder of data that others may share: a link in its place might
    lead anywhere."""
    if folder.name == BESIDE and folder.is_symlink():
        raise FileExistsError(errno.EEXIST, "a link in place of a folder", str(folder))
    folder.mkdir(parents=True, exist_ok=True)


def index_paths(path: Path) -> list[Path]:
    """Beside the data first; else in the user's cache, named by a hash of the full path."""
    digest = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
    beside = path.parent / BESIDE / f"{path.name}.json"
    elsewhere = cache_folder() / "index" / f"{path.stem}-{digest}.json"
    embedded = Path(__file__).resolve().parent.parent in path.resolve().parents
    # Root may write anywhere, as in a container; a folder without write bits counts as read-only.
    closed = path.parent.is_dir() and not path.parent.stat().st_mode & 0o222
    return [elsewhere] if embedded or closed else [beside, elsewhere]


def stamp(path: Path, column: str) -> dict[str, Any]:
    """Identity of a file; taken before it is read, in case it is replaced meanwhile."""
    stat = path.stat()
    return {
        "version": INDEX_VERSION,
        "bytes": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "column": column,
    }


def load_index(path: Path, column: str) -> Any:
    """The saved index of this column, if the file has not changed; else None."""
    for target in index_paths(path):
        try:
            document = json_file.read(target, most=LARGEST_INDEX)
        except (OSError, ValueError):
            continue
        if document.get("of") == stamp(path, column):
            return document.get("clips")
    return None


def save_index(path: Path, of: dict[str, Any], clips: Any) -> None:
    for target in index_paths(path):
        try:
            _make_own(target.parent)
            write(target, json.dumps({"of": of, "clips": clips}))
        except OSError:
            continue
        return
    log.warning(
        "could not save the index of %s: neither its folder nor the cache is writable", path
    )
