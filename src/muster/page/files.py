"""Files that other processes write while they are read: on this machine, or on shared storage from another.

None is read through a link: the page and the report are of a run directory that may come from anybody, and its files
alone are shown. Each is opened before its size is asked for: NFS answers `stat` from a cache that may be a minute old, but asks
its server when a file is opened.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from muster.errors import UnreadableError
from muster.reading.files import open_no_link
from muster.reading.json_file import parse_value

BLOCK = 512  # bytes of a sample: a line or two
TAIL = 16 * 1024  # and of the end, which is read whole
CHUNK = 8 * 2**20  # bytes that are read at a time
MOST = 64 * 2**20  # of one document


class Growing:
    """A .jsonl file to which lines are added, or which is replaced by a shorter one when a run resumes. It is
    in `folders` folders of the run directory."""

    def __init__(self, path: Path, folders: int = 0) -> None:
        self.path, self.folders = path, folders
        self.offset, self.inode = 0, 0

    def unread(self) -> int:
        """Bytes; all of them after the file was replaced."""
        try:
            with open_no_link(self.path, self.folders) as file:
                found = os.fstat(file.fileno())
        except (OSError, UnreadableError):
            return 0
        return found.st_size if self._replaced(found) else found.st_size - self.offset

    def read(self, samples: int | None = None) -> tuple[bool, bytes]:
        """Whether the file is another one than before, and its new whole lines: those of at most `CHUNK`,
        and none once all are read. With `samples`, only of so many places evenly spread over what is new,
        and of its end."""
        try:
            file = open_no_link(self.path, self.folders)
        except (OSError, UnreadableError):
            return False, b""
        with file:
            found = os.fstat(file.fileno())
            if fresh := self._replaced(found):
                self.inode, self.offset = found.st_ino, 0
            if samples is None or found.st_size - self.offset <= samples * BLOCK + TAIL:
                file.seek(self.offset)
                text = file.read(CHUNK)
                while len(text) == CHUNK and b"\n" not in text:
                    self.offset += CHUNK  # no line is as long: a crash may leave many NULs
                    text = file.read(CHUNK)
                whole = _whole_lines(text)
                self.offset += len(whole)
                return fresh, whole
            return fresh, b"".join(self._sample(file.fileno(), found.st_size, samples))

    def chunks(self) -> Iterator[tuple[bool, bytes]]:
        """`read` until all is read; a file that is another one and empty is one chunk."""
        while True:
            fresh, text = self.read()
            if fresh or text:
                yield fresh, text
            if not text:
                return

    def _replaced(self, found: os.stat_result) -> bool:
        return found.st_ino != self.inode or found.st_size < self.offset

    def _sample(self, file: int, size: int, samples: int) -> Iterator[bytes]:
        end = size - TAIL
        for i in range(samples):
            block = os.pread(file, BLOCK, self.offset + i * (end - self.offset) // samples)
            yield _whole_lines(block.partition(b"\n")[2])
        cut, newline, rest = os.pread(file, TAIL, end).partition(b"\n")
        whole = _whole_lines(rest)
        self.offset = end + len(cut + newline) + len(whole)
        yield whole


def _whole_lines(text: bytes) -> bytes:
    return text[: text.rfind(b"\n") + 1]


def from_json(text: str | bytes) -> Any:
    """With null for the numbers that Python writes as NaN and Infinity, and that JSON does not have."""
    return parse_value(text, "the file", numbers="null")


def documents(text: bytes) -> Iterator[dict[str, Any]]:
    """Without lines that are not JSON: a disk was full, or a process was killed."""
    for line in text.split(b"\n"):
        with suppress(ValueError):
            document = from_json(line)
            if isinstance(document, dict):
                yield document


class JsonFile:
    """A document that is replaced as a whole, parsed again when it was. `value` is empty without it. `parse`
    is for another format, and raises ValueError where the text is not of it."""

    def __init__(self, path: Path, parse: Callable[[bytes], Any] = from_json) -> None:
        self.path, self.parse = path, parse
        self.value: dict[str, Any] = {}
        self.changed: float | None = None  # when another content than the first was found
        self._seen: tuple[int, int, int] | None = None

    def refresh(self) -> bool:
        """Whether it changed."""
        try:
            with open_no_link(self.path) as file:
                found = os.fstat(file.fileno())
                seen = (found.st_ino, found.st_mtime_ns, found.st_size)
                if seen == self._seen:
                    return False
                text = file.read(MOST + 1)
            if len(text) > MOST:
                raise ValueError("too large")
            value = self.parse(text)
        except (OSError, ValueError):
            changed, self.value, self._seen = bool(self.value), {}, None
            return changed
        if self._seen is not None:
            self.changed = time.time()
        self._seen, self.value = seen, value if isinstance(value, dict) else {}
        return True
