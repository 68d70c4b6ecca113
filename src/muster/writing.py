"""Making files: whole or not at all, never through a link that someone planted, no wider than their folder.

A run directory says by its own mode who may read it (`logging.mode`). Files in it take that mode without the
bits to execute: those made here at once, those that libraries make because each process of a run calls
`keep_to` first.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter, TextIOWrapper
from pathlib import Path
from typing import IO, Any, Literal, overload

PRIVATE = 0o700
TEMPORARY = ".part"
ABANDONED_S = 60.0  # a temporary file this old has lost its writer


def mode_of(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode) & 0o777


def keep_to(folder: Path) -> None:
    """What this process and its children make from now on is as wide as `folder`, and never open to
    everybody's writing."""
    os.umask(0o777 & ~mode_of(folder) | 0o002)


def current_umask() -> int:
    """Without changing it, which other threads would notice."""
    with suppress(OSError, ValueError, StopIteration), open("/proc/self/status") as lines:
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    now = os.umask(0o077)
    os.umask(now)
    return now


def set_mode(folder: Path, mode: int) -> None:
    """Everything that this user owns in `folder`, links aside: folders get `mode`, files the same without
    the bits to execute. Those above come first, so that nothing below is open while it changes."""
    for _, folders, files, here in os.fwalk(folder):
        _chmod(here, mode)
        for name, wanted in [(f, mode) for f in folders] + [(f, mode & 0o666) for f in files]:
            with suppress(OSError):  # a link, or removed meanwhile
                opened = os.open(
                    name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here
                )
                try:
                    _chmod(opened, wanted)
                finally:
                    os.close(opened)


def _chmod(descriptor: int, mode: int) -> None:
    with suppress(OSError):  # another user's, or a file system without modes
        if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o777 != mode:
            os.fchmod(descriptor, mode)


def make_folder(path: Path) -> Path:
    """With its parents, each no wider than the folder that it is in."""
    if not path.is_dir():
        parent = make_folder(path.parent)
        path.mkdir(mode=mode_of(parent), exist_ok=True)
    return path


@contextmanager
def temporary(path: Path) -> Iterator[Path]:
    """A new empty file beside `path`, of a name that cannot be guessed, which takes the name `path` at the
    end: readers see the old content or the new. Removed after an error."""
    part = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}{TEMPORARY}")
    wanted = 0o666 & mode_of(path.parent)
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, wanted))
    try:
        yield part
        os.replace(part, path)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)  # a write does not say where it failed
        with suppress(OSError):
            part.unlink()
        raise


def write(path: Path, content: str | bytes, *, sync: bool = False) -> None:
    """Atomically. `sync`: on the disk before it has its name."""
    with temporary(path) as part, part.open("wb") as file:
        file.write(content.encode("utf-8", "replace") if isinstance(content, str) else content)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def write_json(path: Path, document: Any, *, sync: bool = False) -> None:
    write(path, json.dumps(document, indent=2) + "\n", sync=sync)


@overload
def open_own(path: Path, mode: Literal["a", "w"] = "a", buffering: int = -1) -> TextIOWrapper: ...


@overload
def open_own(path: Path, mode: Literal["ab", "wb"], buffering: int = -1) -> BufferedWriter: ...


def open_own(path: Path, mode: str = "a", buffering: int = -1) -> IO[Any]:
    """Open a file to append to, or with `w` to begin anew. A link in its place is refused: it might lead to
    any file that this user may write."""
    wanted = 0o666 & mode_of(path.parent)

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, wanted)

    return open(path, mode, buffering=buffering, opener=opener)


def touch(path: Path) -> None:
    """Make an empty file, or note that it is still wanted."""
    with open_own(path) as file:
        os.utime(file.fileno())


def remove_abandoned(folder: Path) -> None:
    """Temporary files of processes that were killed while they wrote."""
    now = time.time()
    for part in folder.glob(f".*{TEMPORARY}"):
        with suppress(OSError):
            if now - part.lstat().st_mtime > ABANDONED_S:
                part.unlink()


def point(link: Path, target: str) -> None:
    """Make `link` a link to `target`, or change it, atomically. FileExistsError where there is a folder or a
    file by that name."""
    if not link.is_symlink() and os.path.lexists(link):
        raise FileExistsError(link)
    part = link.with_name(f".{link.name}.{secrets.token_hex(8)}{TEMPORARY}")
    part.symlink_to(target)
    try:
        os.replace(part, link)
    except OSError:
        part.unlink(missing_ok=True)
        raise
