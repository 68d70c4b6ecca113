"""A run directory whose storage fails: the words for it, and room for a run's last words on a full disk."""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from muster.writing import TEMPORARY, open_own

WORDS = {
    errno.ENOSPC: "the disk that holds {} is full; free some space",
    errno.EDQUOT: "the disk quota of {} is used up; free some space, or ask for more",
    errno.EROFS: "{} is on a file system that has become read-only; see dmesg, and mount it for writing",
    errno.EFBIG: "no file in {} may grow as large as it has to; raise `ulimit -f`",
    errno.EIO: "the storage of {} fails with an input/output error; see dmesg on this host",
    errno.ESTALE: "the file server of {} no longer knows it; mount it again",
    errno.ENOTCONN: "the file system of {} is no longer connected; mount it again",
    errno.ENOENT: "{} is no longer there; bring it back, or mount it again",
    errno.EACCES: "{} may no longer be written by this user; see its owner and mode",
}
RESERVE, RESERVED = ".reserve", 128 * 1024  # bytes: run.json with a failure in it


def problem_words(error: OSError, folder: Path) -> str | None:
    """What is wrong with the storage of a run directory, and the cure; None for another error."""
    words = WORDS.get(error.errno or 0)
    path = error.filename
    elsewhere = isinstance(path, str) and not Path(path).is_relative_to(folder)
    if words is None or (elsewhere and error.errno in (errno.ENOENT, errno.EACCES)):
        return None
    if error.errno == errno.ENOENT and folder.is_dir():
        return None  # only one of its files
    where = Path(path).parent if isinstance(path, str) and elsewhere else folder
    return f"{words.format(where)} and resume"


def command_words(error: OSError) -> str | None:
    """Of a command that could not write, wherever that was; None for an error that is no storage's."""
    words = WORDS.get(error.errno or 0)
    if words is None or error.errno in (errno.ENOENT, errno.EACCES):
        return None
    named = isinstance(error.filename, str)
    return words.format(Path(error.filename).parent if named else "what is written") + (
        " and try again"
    )


def problem(folder: Path) -> str | None:
    """Why nothing can be written there now; None where something can."""
    path = folder / f".try.{secrets.token_hex(8)}{TEMPORARY}"
    try:
        with open_own(path, "wb") as file:
            file.write(bytes(64 * 1024))
    except OSError as error:
        return problem_words(error, folder) or f"{folder} cannot be written ({error.strerror})"
    finally:
        with suppress(OSError):
            path.unlink()
    return None


def reserve(folder: Path) -> None:
    """Keep room for what is written last. Nothing is kept where there is none."""
    with suppress(OSError), open_own(folder / RESERVE, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, RESERVED)


def give_back(folder: Path) -> None:
    with suppress(OSError):
        (folder / RESERVE).unlink()


def insist(folder: Path, write: Callable[[], object], seconds: float = 15.0) -> None:
    """Write last words: at once, then with the room that was kept for them, then again for so long."""
    end, first = time.monotonic() + seconds, True
    while True:
        try:
            write()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            give_back(folder)
            if not first:
                time.sleep(0.5)
            first = False
