"""What the kinds of storage have in common: list objects, and read one from some byte on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

# What an address names: one file, those that a pattern matches, or a place to pick them from.
Kind = Literal["file", "glob", "folder"]
MAGIC = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class RemoteFile:
    """One object as it was when it was listed. Another `version` is another content."""

    url: str  # without credentials; for messages, and for the place in the cache
    relative: str  # path from the address that was listed, with the object's own name
    size: int
    version: str  # ETag, checksum or time of modification
    digest: str = ""  # `sha256:…` or `git:…` where the store gives it
    address: str = field(default="", repr=False)  # where it is read, if not at `url`


class Store(Protocol):
    def find(self, spec: str) -> tuple[list[RemoteFile], Kind]: ...

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        """Its bytes from `offset` on, in pieces; a TemporaryError where it broke off."""
        ...


def split_glob(path: str) -> tuple[str, str | None]:
    """The folder to list and the pattern below it, of `folder/part-*.parquet`."""
    found = MAGIC.search(path)
    if found is None:
        return path.rstrip("/"), None
    folder, slash, _ = path[: found.start()].rpartition("/")
    return folder, path[len(folder) + len(slash) :]


def matches(relative: str, pattern: str) -> bool:
    """As `glob` with `**`: `*` and `?` stay inside one folder, and hidden files are left out."""
    return visible(relative) and re.fullmatch(_regex(pattern), relative, re.DOTALL) is not None


def _regex(pattern: str) -> str:
    tokens = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    out = ""
    for token in re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]]+\]|.", pattern, re.DOTALL):
        if len(token) > 1 and token[0] == "[":
            out += "[^" + token[2:] if token[1] == "!" else token
        else:
            out += tokens.get(token) or re.escape(token)
    return out


def visible(relative: str) -> bool:
    """Names that begin with a dot are left out, as on disk."""
    return not any(part.startswith(".") for part in relative.split("/"))
