"""The heartbeats of one node's ranks in one file: 1,024 ranks on 128 nodes write 128 files a second, not 1,024.

Ranks send theirs to a process of their node: the supervisor, else the node's first rank. It is a Unix
datagram of the same user, over the abstract address that both know, so it leaves no file behind and waits for
nobody. Where nobody takes it (the process is gone, or stopped and its queue full), the rank writes its own
file.

That process answers: whether a rank of the run has stalled, and to a rank that waits long, the heartbeats of
all others. So it looks at the files of the other nodes once for all ranks of its own.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.observe.heartbeats import Heartbeats, State, stall_file
from muster.writing import make_folder, write

log = logging.getLogger(__name__)

ADDRESS = "MUSTER_HEARTBEATS"  # of the supervisor's, in the environment of its ranks
EVERY_S = 1.0
PATIENCE_S = 0.2  # of a rank: the kernel may queue no more than ten messages
MOST_BYTES = 16 * 1024  # of one heartbeat
MOST_LOOK_BYTES = 2**26
HEARD_S = 5.0  # without an answer: then a rank looks at the files itself
LOOKED_AT_PER_S = 16  # files of other nodes, by one node while ranks of it wait long
LOOKED_AT = ("rank", "time", "since", "phase", "limit_s")
FILE = struct.Struct("i")  # its number in this process
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of the sender, by the kernel


class Collector(threading.Thread):
    """Writes `ranks/node-<name>.heartbeats.json` while it runs."""

    def __init__(self, folder: Path, name: str, attempt: str = "") -> None:
        super().__init__(name="heartbeats", daemon=True)
        self.path = folder / "ranks" / f"node-{name}.heartbeats.json"
        self._stall_file = stall_file(self.path.parent, attempt)
        self.address = f"muster-heartbeats-{secrets.token_hex(16)}"
        self.latest: dict[int, Mapping[str, Any]] = {}
        self._where: dict[int, bytes] = {}  # each rank takes answers
        self._everyone, self._looks, self._look_due = Heartbeats(self.path.parent), 0, 0.0
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
                with suppress(OSError):  # of storage that fails for a moment
                    self._answer()

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
            message, extras, _, where = self._socket.recvmsg(MOST_BYTES, space)
        except OSError:  # none within the time
            return False
        if _sender(extras) == os.getuid():
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                state = json.loads(message)
                rank = int(state["rank"])
                self.latest[rank] = state
                if where:
                    self._where[rank] = where
        return True

    def _write(self) -> None:
        """A full disk must not end the heartbeats."""
        states = [self.latest[rank] for rank in sorted(self.latest)]
        with suppress(OSError):
            if states:
                write(self.path, json.dumps({"ranks": states}) + "\n")

    def _answer(self) -> None:
        """To each rank: whether one has stalled, and if one of them asks, what all others do. That is sent as an
        open file, since a socket holds no more than the states of some hundred ranks."""
        every_s = max(EVERY_S, self._everyone.files / LOOKED_AT_PER_S)
        answer: dict[str, Any] = {"every_s": every_s}
        answer["stalled"] = self._stall_file.exists()
        asking = {rank for rank in self._where if self.latest[rank].get("asks")}
        look: int | None = None
        if asking and time.monotonic() >= self._look_due:
            self._everyone.refresh()
            self._look_due = time.monotonic() + every_s
            self._looks += 1
            answer["look"] = self._looks
            look = _memory_file(
                [[s.get(name) for name in LOOKED_AT] for s in self._everyone.latest.values()]
            )
        message = json.dumps(answer).encode()
        rights = [] if look is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, FILE.pack(look))]
        for where in self._where.values():
            with suppress(OSError):  # it has ended, or does not read
                self._socket.sendmsg([message], rights, socket.MSG_DONTWAIT, where)
        if look is not None:
            os.close(look)


@contextmanager
def collecting(folder: Path, name: str, attempt: str = "") -> Iterator[None]:
    """In a supervisor, a collector for the ranks that it starts meanwhile."""
    collector = open_collector(folder, name, attempt)
    os.environ[ADDRESS] = collector.address if collector else ""
    try:
        yield
    finally:
        del os.environ[ADDRESS]
        if collector:
            collector.close()


def open_collector(folder: Path, name: str, attempt: str = "") -> Collector | None:
    """None where there can be none, such as on a full disk: then each rank writes its own file."""
    try:
        return Collector(folder, name, attempt)
    except OSError as error:
        log.info("each rank writes its own heartbeat: %s", error)
        return None


@dataclass(frozen=True)
class Look:
    """What the collector saw of all ranks, once every `every_s`; number 0: nothing yet."""

    number: int = 0
    every_s: float = EVERY_S
    states: tuple[State, ...] = ()


class Sender:
    """To the collector at `address`, if any."""

    def __init__(self, address: str | None) -> None:
        self.address = address
        self._socket: socket.socket | None = None
        self._stalled, self._look = False, Look()
        self._heard = self._looked = self._asked = -math.inf  # by the monotonic clock
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind(f"\0muster-rank-{secrets.token_hex(16)}")
            self._socket.settimeout(PATIENCE_S)

    def send(self, state: Mapping[str, Any]) -> bool:
        """Whether the collector takes it."""
        if self._socket is None:
            return False
        if time.monotonic() - self._asked < HEARD_S:
            state = {**state, "asks": True}
        try:
            self._socket.sendto(json.dumps(state).encode(), f"\0{self.address}")
        except OSError:  # it is gone, or does not listen any more
            return False
        return True

    def stalled(self) -> bool | None:
        """Whether the collector knows of a stalled rank; None where it does not answer."""
        self._receive()
        return self._stalled if time.monotonic() - self._heard < HEARD_S else None

    def look(self) -> Look | None:
        """The newest, which the next heartbeat asks for; None where the collector does not answer."""
        if (now := time.monotonic()) - self._asked > HEARD_S:
            self._looked = now  # the first of several
        self._asked = now
        self._receive()
        return self._look if now - self._looked < HEARD_S + self._look.every_s else None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _receive(self) -> None:
        """All answers there are; one that is not of this user's collector counts for nothing."""
        space = socket.CMSG_SPACE(CREDENTIALS.size) + socket.CMSG_SPACE(FILE.size)
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        while self._socket is not None:
            try:
                message, extras, _, where = self._socket.recvmsg(MOST_BYTES, space, flags)
            except OSError:
                return
            files = _files(extras)
            if _sender(extras) == os.getuid() and where == f"\0{self.address}".encode():
                with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
                    self._take(json.loads(message), files)
            for file in files:
                os.close(file)

    def _take(self, answer: Mapping[str, Any], files: Sequence[int]) -> None:
        self._stalled, self._heard = bool(answer["stalled"]), time.monotonic()
        states: tuple[State, ...] = self._look.states
        number = self._look.number
        if files:
            rows = json.loads(os.pread(files[0], MOST_LOOK_BYTES, 0))
            states = tuple(dict(zip(LOOKED_AT, row, strict=True)) for row in rows)
            number, self._looked = int(answer["look"]), self._heard
        self._look = Look(number, float(answer["every_s"]), states)


def _memory_file(document: Any) -> int:
    """Open, of no folder."""
    file = os.memfd_create("muster-heartbeats")
    os.write(file, json.dumps(document).encode())
    return file


def _files(extras: list[tuple[int, int, bytes]]) -> list[int]:
    """Those that came open with a message."""
    return [
        number
        for level, kind, data in extras
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (number,) in FILE.iter_unpack(data[: len(data) // FILE.size * FILE.size])
    ]


def _sender(extras: list[tuple[int, int, bytes]]) -> int | None:
    for level, kind, data in extras:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            return int(CREDENTIALS.unpack(data[: CREDENTIALS.size])[1])
    return None
