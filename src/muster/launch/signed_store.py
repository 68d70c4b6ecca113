"""A torch.distributed store whose values are authenticated with the run's secret.

torch's TCPStore answers whoever reaches its port: any process may list, read and write its keys. What
this wrapper reads was written by a process that knows the secret, under the same `scope` and key, and is
not older than what was read before. Anything else is taken for absent, and named once in the log.
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import hmac
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

from muster.errors import LaunchError

log = logging.getLogger(__name__)

MAC_BYTES, WRITER_BYTES, COUNT_BYTES = 32, 8, 8
HEADER_BYTES = MAC_BYTES + WRITER_BYTES + COUNT_BYTES
MOST_BYTES = 2**20  # of one value
# Of a process's own values that are of an attempt, whose keys begin with its number: to be written again.
KEPT = 16
# Between looks at a key: torch's own wait warns at its end.
LEAST_SLEEP_S, MOST_SLEEP_S = 0.005, 0.25
AGAIN_S = 1.0  # of waiting, before values of this process's own are written again


class SignedStore:
    """`set`, `get`, `check`, `wait`, `multi_get` and `compare_set` of a store of torch's. No key is removed.

    `scope` is part of what is signed: a value of another run or attempt is not authentic. Without a
    `secret` only sizes are checked. `raw` is the store itself, for what torch writes into it.
    """

    def __init__(self, raw: Any, secret: bytes | None, scope: str = "") -> None:
        self.raw, self.scope, self._secret = raw, scope, secret
        self._writer, self._count = secrets.token_bytes(WRITER_BYTES), itertools.count(1)
        self._latest: dict[str, tuple[bytes, int]] = {}  # of each key: the writer, and its count
        self._highest: dict[tuple[str, bytes], int] = {}
        self._own: dict[str, bytes] = {}
        self._told: set[str] = set()
        self._lock = threading.Lock()

    @property
    def port(self) -> int:
        """0 where it is in this process."""
        return int(getattr(self.raw, "port", 0))

    def over(self, raw: Any) -> SignedStore:
        """The same store by another connection, for another thread."""
        other = copy.copy(self)
        other.raw = raw
        return other

    def set(self, key: str, value: str | bytes) -> None:
        signed = self._sign(key, value)
        self._keep(key, signed)
        self._verified(key, signed)  # so that an older value of its own is not taken for a newer
        self.raw.set(key, signed)

    def get(self, key: str) -> bytes:
        """The authentic value of `key`, once there is one."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys, self.raw.timeout)
        found = self._authentic(keys)
        if missing := [key for key in keys if key not in found]:
            raise RuntimeError(f"{missing[0]} was removed from the store, or overwritten")
        return [found[key] for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them have an authentic value."""
        return self.raw.check(list(keys)) and len(self._authentic(keys)) == len(set(keys))

    def present(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The authentic values of those of `keys` that have one, in few messages."""
        return self._opened_all(self._there(keys))

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Until all of them have an authentic value. What this process wrote itself, and others have
        overwritten, is written again meanwhile. RuntimeError after `timeout`, as with torch's stores."""
        limit = (self.raw.timeout if timeout is None else timeout).total_seconds()
        start, again = time.monotonic(), AGAIN_S
        while not self.check(keys):
            waited = time.monotonic() - start
            if waited > limit:
                raise RuntimeError(f"no authentic value of {', '.join(keys[:4])} in {limit:.0f} s")
            if waited > again:
                again = waited + AGAIN_S
                self.write_again()
            time.sleep(min(MOST_SLEEP_S, LEAST_SLEEP_S + waited / 10))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """The first authentic value of `key`, which is `desired` if there was none. Only with
        `expected` empty."""
        if expected:
            raise ValueError("compare_set on a signed store takes an empty `expected` only")
        signed, before = self._sign(key, desired), b""
        while (value := self.raw.compare_set(key, before, signed)) != signed:
            if value == before:  # torch's answer where the key does not exist
                before = b""
            elif (found := self._verified(key, value)) is not None:
                return found
            else:
                before = value  # a foreign value is replaced
        self._keep(key, signed)
        return desired.encode()

    def write_again(self) -> None:
        """Write the latest values of this process again where others have overwritten or removed them."""
        with self._lock:
            own = dict(self._own)
        there = self._there(list(own))
        for key, signed in own.items():
            found = there.get(key, b"")
            if found != signed and self._verified(key, found, tell=False) is None:
                self.raw.set(key, signed)

    def _keep(self, key: str, signed: bytes) -> None:
        """In several threads: heartbeats write again what others keep."""
        with self._lock:
            self._own.pop(key, None)
            self._own[key] = signed
            of_attempts = [key for key in self._own if key[:1].isdigit()]
            if len(of_attempts) > KEPT:
                del self._own[of_attempts[0]]

    def _authentic(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The values among those of `keys`, which exist, that are authentic."""
        return self._opened_all(dict(zip(keys, self.raw.multi_get(list(keys)), strict=True)))

    def _there(self, keys: Sequence[str]) -> dict[str, bytes]:
        """What is under those of `keys` that exist, by whomever. Two messages where all do."""
        if not keys or not self.raw.check(list(keys)):
            if len(keys) < 2:
                return {}
            middle = len(keys) // 2
            return {**self._there(keys[:middle]), **self._there(keys[middle:])}
        return dict(zip(keys, self.raw.multi_get(list(keys)), strict=True))

    def _opened_all(self, values: dict[str, bytes]) -> dict[str, bytes]:
        found = {key: self._verified(key, value) for key, value in values.items()}
        return {key: value for key, value in found.items() if value is not None}

    def _sign(self, key: str, value: str | bytes) -> bytes:
        payload = value.encode() if isinstance(value, str) else value
        if len(payload) > MOST_BYTES:
            raise LaunchError(
                f"the message {key} of {len(payload)} bytes is larger than the store takes ({MOST_BYTES})"
            )
        if self._secret is None:
            return payload
        rest = self._writer + next(self._count).to_bytes(COUNT_BYTES) + payload
        return self._mac(key, rest) + rest

    def _mac(self, key: str, rest: bytes) -> bytes:
        where = f"{len(self.scope)}:{self.scope}:{len(key)}:{key}:".encode()
        return hmac.digest(self._secret or b"", where + rest, hashlib.sha256)

    def _verified(self, key: str, value: bytes, *, tell: bool = True) -> bytes | None:
        """The payload, or None for a value that is foreign, too large, or older than one read before."""
        payload = value
        if len(value) > MOST_BYTES + HEADER_BYTES:
            why = f"has {len(value)} bytes"
        elif self._secret is None:
            why = ""
        else:
            payload, why = self._opened(key, value)
        if why and tell and key not in self._told:
            self._told.add(key)
            log.warning(
                "another process writes into this run's store: its value of %s %s, and is ignored",
                key,
                why,
            )
        return None if why else payload

    def _opened(self, key: str, value: bytes) -> tuple[bytes, str]:
        """The payload of a signed value, and why it is not authentic, if so."""
        mac, rest = value[:MAC_BYTES], value[MAC_BYTES:]
        if len(value) < HEADER_BYTES or not hmac.compare_digest(mac, self._mac(key, rest)):
            return b"", "is not signed with the run's secret"
        writer, count = rest[:WRITER_BYTES], int.from_bytes(rest[WRITER_BYTES:][:COUNT_BYTES])
        with self._lock:
            if count > self._highest.get((key, writer), 0):
                self._latest[key] = (writer, count)
                self._highest[key, writer] = count
            elif self._latest.get(key) != (writer, count):
                return b"", "is older than the one before"
        return rest[WRITER_BYTES + COUNT_BYTES :], ""


def unverified(raw: Any, key: str) -> bytes:
    """What is under `key`, by whomever: for what tells where the secret is."""
    value = bytes(raw.get(key))
    return value[HEADER_BYTES:] if len(value) <= MOST_BYTES + HEADER_BYTES else b""
