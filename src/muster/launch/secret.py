"""The secret that authenticates the messages of one run: who knows it may speak in the run's store.

Its supervisor makes it. Its ranks have it in their environment; the supervisors of other nodes read it
from a file in the run directory that only its owner can read. It is on no command line and in no log.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from muster.errors import LaunchError

# The user's own, the same on every node; or a supervisor's, for its ranks.
VARIABLE = "MUSTER_SECRET"
FILE = ".secret"
BYTES, LEAST_CHARACTERS = 32, 16


def from_environment(env: Mapping[str, str] = os.environ) -> bytes | None:
    """What MUSTER_SECRET says; None where it is not set."""
    text = env.get(VARIABLE, "")
    if not text:
        return None
    if len(text) < LEAST_CHARACTERS:
        raise LaunchError(
            f"{VARIABLE} has {len(text)} characters, which can be guessed; give at least "
            f'{LEAST_CHARACTERS}, such as {VARIABLE}="$(openssl rand -hex 32)", the same on every node'
        )
    return text.encode()


def drawn() -> str:
    """A secret for MUSTER_SECRET, for ranks that are this process's children."""
    return secrets.token_hex(BYTES)


def make(folder: Path, fresh: bytes | None = None) -> bytes:
    """A new secret for this start of the run in `folder`, with `fresh` or drawn bytes in a file there."""
    fresh = fresh or secrets.token_bytes(BYTES)
    temporary = folder / f"{FILE}-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
        file.write(fresh)
    os.replace(temporary, folder / FILE)
    return _mixed(fresh)


def read(folder: Path) -> bytes:
    """The secret of the run in `folder`, on a node that did not make it."""
    path = folder / FILE
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise LaunchError(
            f"{path}, with which nodes know each other, cannot be read ({error.strerror}); node 0 writes it "
            "when it starts and removes it at the end: is node 0 running, and as the same user?"
        ) from None
    with os.fdopen(number, "rb") as file:
        facts = os.fstat(number)
        if from_environment() is None:
            _refuse_others(path, facts)
        found = file.read(BYTES + 1) if stat.S_ISREG(facts.st_mode) else b""
    if len(found) != BYTES:
        raise LaunchError(
            f"{path} is no secret of muster's; start again on node 0, which writes it"
        )
    return _mixed(found)


def start_name() -> str:
    """Of this start of the run, in names; the same on every node. It tells nothing about the secret."""
    return hmac.digest(from_environment() or b"", b"the name of this start", "sha256")[:4].hex()


def remove(folder: Path, made_of: bytes) -> None:
    """At the end of this start: not the file of one that has taken the run over."""
    path = folder / FILE
    with suppress(OSError):
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(number, "rb") as file:
            if file.read(BYTES + 1) == made_of:
                path.unlink()


def _mixed(fresh: bytes) -> bytes:
    """With the user's own secret, if there is one: then the file alone tells a reader nothing."""
    own = from_environment()
    return hmac.digest(own, fresh, hashlib.sha256) if own else fresh


def _refuse_others(path: Path, facts: os.stat_result) -> None:
    """Of another user, or for others to read: they could decide for this node."""
    if facts.st_uid != os.geteuid():
        problem = f"belongs to user {facts.st_uid}, and this node runs as user {os.geteuid()}"
        cure = "start every node as the same user"
    elif facts.st_mode & 0o077:
        problem = f"can be read by others (mode {stat.S_IMODE(facts.st_mode):04o})"
        cure = "put logging.dir on storage that keeps modes"
    else:
        return
    raise LaunchError(
        f"{path} {problem}; {cure}, or set {VARIABLE} to the same random text on every node"
    )
