"""Messages between the judge and the ranks: JSON in a torch.distributed store, signed where they share a
secret.

Not collectives, because those are what is being checked. `Store.wait` is not used: every wait polls,
and so keeps its timeout whatever happens to the other side.
"""

from __future__ import annotations

import json
import time
from typing import Any

from muster.errors import LaunchError
from muster.launch.signed_store import SignedStore
from muster.reading.json_file import parse_value

POLL_S = 0.02
HEARTBEAT_S = 0.5  # between a rank's heartbeats


class MessageStore:
    def __init__(self, store: Any, secret: bytes | None = None) -> None:
        self.store, self._signed = store, SignedStore(store, secret)

    def post(self, key: str, value: Any) -> None:
        self._signed.set(f"check/{key}", json.dumps(value))

    def read(self, key: str) -> Any:
        """None before it is posted."""
        name = f"check/{key}"
        if not self._signed.check([name]):
            return None
        return parse_value(self._signed.get(name), f"the message {name}")

    def wait(self, key: str, limit_s: float, whom: str) -> Any:
        end = time.monotonic() + limit_s
        while (value := self.read(key)) is None:
            if time.monotonic() > end:
                raise LaunchError(f"timed out after {limit_s:.0f} s waiting for {whom} ({key})")
            time.sleep(POLL_S)
        return value

    def barrier(self, name: str, rank: int, world: int, limit_s: float) -> None:
        """Wait until every rank has called this."""
        self.post(f"barrier/{name}/{rank}", True)
        end = time.monotonic() + limit_s
        for other in range(world):
            left = max(0.0, end - time.monotonic())
            self.wait(f"barrier/{name}/{other}", left, f"rank {other}")
