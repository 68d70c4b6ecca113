"""Bytes and text of files that anybody may have written."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NoReturn

from muster.errors import MusterError, RecipeError, UnreadableError
from muster.reading.text import in_one_line, printable

LONGEST, LONGEST_NAME = 4095, 255  # bytes of a path, and of a part of it
SMALL = 2**16  # bytes: files of the kernel say that they have none
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
Refuse = Callable[[str], NoReturn]  # with what is wrong; raises


def read_bytes(path: Path, most: int) -> bytes:
    """All of a regular file of at most `most` bytes; a pipe or a device would never end."""
    with open_file(path) as file:
        size = max(os.fstat(file.fileno()).st_size, SMALL)
        text = file.read(min(most, size) + 1)  # room is made for as much as is asked for
    if len(text) > most:
        raise UnreadableError(
            f"{printable(str(path))}: is larger than {_size(most)}, the most that muster reads of such a file"
        )
    return text


def open_file(path: Path) -> BinaryIO:
    """To be read bit by bit. Not of a pipe, whose opening waits, nor of a device, which may have no end."""
    return _regular(os.open(path, READ), path)


def open_no_link(path: Path, folders: int = 0) -> BinaryIO:
    """The same of a file that is no link, in `folders` folders that are none: what is shown or mailed is then of
    the folder above them. OSError for a link."""
    above = os.open(path.parents[folders], READ | os.O_DIRECTORY)
    try:
        for parent in reversed(path.parents[:folders]):
            inner = os.open(parent.name, READ | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
            os.close(above)
            above = inner
        return _regular(os.open(path.name, READ | os.O_NOFOLLOW, dir_fd=above), path)
    finally:
        os.close(above)


def _regular(handle: int, path: Path) -> BinaryIO:
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise UnreadableError(f"{printable(str(path))}: is not a file but a pipe or a device")


def expanded(name: str | Path, kind: type[MusterError] = RecipeError) -> Path:
    """A path as a recipe gives it, with `~` as the home of its user, where there is such a user. A name that no
    file can have is refused."""
    text = str(name)
    if len(text.encode(errors="replace")) > LONGEST or any(
        len(part.encode(errors="replace")) > LONGEST_NAME for part in text.split("/")
    ):
        raise kind(f"{in_one_line(text)}: is too long for the name of a file; give a shorter one")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def is_file(path: Path) -> bool:
    """False too for a name that no file can have, such as one that is too long."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def read_text(path: Path, most: int) -> str:
    return decode(read_bytes(path, most), path)


def decode(text: bytes, where: object) -> str:
    """UTF-8, with or without the byte order mark that some editors put first."""
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise UnreadableError(
            f"{printable(str(where))}, line {line}: is not UTF-8 (byte 0x{text[error.start]:02x}); save it as UTF-8"
        ) from None


def _size(number: int) -> str:
    return f"{number / 2**20:g} MiB" if number >= 2**20 else f"{number / 2**10:g} KiB"
