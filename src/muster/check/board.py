"""How the judge and the ranks talk: small JSON texts in a store.

Not by collectives, because those are what is being checked. Nobody waits inside the store: every
wait asks again and again and so keeps its limit, whatever happens to the other side.
"""

from __future__ import annotations

import json
import time
from typing import Any

from muster.errors import LaunchError

POLL_S = 0.02
PULSE_S = 0.5  # between a rank's signs of life


class Board:
    def __init__(self, store: Any) -> None:
        self.store = store

    def post(self, key: str, value: Any) -> None:
        self.store.set(f"check/{key}", json.dumps(value))

    def read(self, key: str) -> Any:
        """None while nobody has posted it."""
        name = f"check/{key}"
        return json.loads(self.store.get(name)) if self.store.check([name]) else None

    def wait(self, key: str, limit_s: float, whom: str) -> Any:
        end = time.monotonic() + limit_s
        while (value := self.read(key)) is None:
            if time.monotonic() > end:
                raise LaunchError(f"waited {limit_s:.0f} s for {whom} ({key}) in vain")
            time.sleep(POLL_S)
        return value

    def meet(self, name: str, rank: int, world: int, limit_s: float) -> None:
        """Wait until every rank has come to this point."""
        self.post(f"meet/{name}/{rank}", True)
        end = time.monotonic() + limit_s
        for other in range(world):
            left = max(0.0, end - time.monotonic())
            self.wait(f"meet/{name}/{other}", left, f"rank {other}")
