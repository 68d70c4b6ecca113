"""The heartbeats of one node's ranks in one file: 1,024 ranks on 128 nodes write 128 files a second, not 1,024.

Ranks send theirs to a process of their node: the supervisor, else the node's first rank. It is a Unix
datagram of the same user, over the abstract address that both know, so it leaves no file behind and waits for
nobody. Where nobody takes it (the process is gone, or stopped and its queue full), the rank writes its own
file.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from muster.writing import make_folder, write

log = logging.getLogger(__name__)

ADDRESS = "MUSTER_HEARTBEATS"  # of the supervisor's, in the environment of its ranks
EVERY_S = 1.0
PATIENCE_S = 0.2  # of a rank: the kernel may queue no more than ten messages
MOST_BYTES = 16 * 1024  # of one heartbeat
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of the sender, by the kernel


class Collector(threading.Thread):
    """Writes `ranks/node-<name>.heartbeats.json` while it runs."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(name="heartbeats", daemon=True)
        self.path = folder / "ranks" / f"node-{name}.heartbeats.json"
        self.address = f"muster-heartbeats-{secrets.token_hex(16)}"
        self.latest: dict[int, Mapping[str, Any]] = {}
        make_folder(self.path.parent)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(f"\0{self.address}")
        self._socket.settimeout(EVERY_S / 4)
        self._done = threading.Event()
        self.start()

    def run(self) -> None:
        fresh, due = False, time.monotonic()
        while not self._done.is_set():
            fresh |= self._receive()
            if fresh and time.monotonic() >= due:
                fresh, due = False, time.monotonic() + EVERY_S
                self._write()

    def close(self) -> None:
        """With what the ranks sent last."""
        if self._done.is_set():
            return
        self._done.set()
        self.join()
        self._socket.settimeout(0)
        while self._receive():
            pass
        self._write()
        self._socket.close()

    def _receive(self) -> bool:
        """Whether there was a message; one that is none of this user's ranks counts for nothing."""
        try:
            space = socket.CMSG_SPACE(CREDENTIALS.size)
            message, extras, _, _ = self._socket.recvmsg(MOST_BYTES, space)
        except OSError:  # none within the time
            return False
        if _sender(extras) == os.getuid():
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                state = json.loads(message)
                self.latest[int(state["rank"])] = state
        return True

    def _write(self) -> None:
        """A full disk must not end the heartbeats."""
        states = [self.latest[rank] for rank in sorted(self.latest)]
        with suppress(OSError):
            if states:
                write(self.path, json.dumps({"ranks": states}) + "\n")


@contextmanager
def collecting(folder: Path, name: str) -> Iterator[None]:
    """In a supervisor, a collector for the ranks that it starts meanwhile."""
    collector = open_collector(folder, name)
    os.environ[ADDRESS] = collector.address if collector else ""
    try:
        yield
    finally:
        del os.environ[ADDRESS]
        if collector:
            collector.close()


def open_collector(folder: Path, name: str) -> Collector | None:
    """None where there can be none, such as on a full disk: then each rank writes its own file."""
    try:
        return Collector(folder, name)
    except OSError as error:
        log.info("each rank writes its own heartbeat: %s", error)
        return None


class Sender:
    """To the collector at `address`, if any."""

    def __init__(self, address: str | None) -> None:
        self.address = address
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.settimeout(PATIENCE_S)

    def send(self, state: Mapping[str, Any]) -> bool:
        """Whether the collector takes it."""
        if self._socket is None:
            return False
        try:
            self._socket.sendto(json.dumps(state).encode(), f"\0{self.address}")
        except OSError:  # it is gone, or does not listen any more
            return False
        return True

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def _sender(extras: list[tuple[int, int, bytes]]) -> int | None:
    for level, kind, data in extras:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            return int(CREDENTIALS.unpack(data[: CREDENTIALS.size])[1])
    return None
