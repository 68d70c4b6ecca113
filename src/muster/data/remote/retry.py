"""What fails for now is tried again, with longer and longer waits."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from muster.errors import DataError

log = logging.getLogger(__name__)

TRIES = 8  # in a row without a byte of progress
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0

Found = TypeVar("Found")


class TemporaryError(Exception):
    """Another try may succeed. `wait_s`: what the server asks for."""

    def __init__(self, words: str, wait_s: float = 0.0) -> None:
        super().__init__(words)
        self.wait_s = wait_s


class Patience:
    """Waits between tries of one thing, until there were too many in a row, or they took `limit_s`."""

    def __init__(self, what: str, limit_s: float | None = None) -> None:
        self.what, self.failures = what, 0
        self.limit_s, self._begun = limit_s, time.monotonic()
        self._random = random.Random()  # not the one that training may be seeded with

    def progress(self) -> None:
        self.failures = 0

    def wait(self, error: TemporaryError) -> None:
        self.failures += 1
        if self.failures >= TRIES:
            raise DataError(
                f"{self.what}: {error}, {TRIES} times in a row; try again when it can be reached: what has been "
                "copied so far is kept"
            )
        longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (self.failures - 1))
        pause = max(longest * self._random.uniform(0.5, 1.0), min(error.wait_s, LONGEST_WAIT_S))
        taken = time.monotonic() - self._begun
        if self.limit_s is not None and taken + pause >= self.limit_s:
            raise DataError(
                f"{self.what}: {error}, tried for {taken:.0f} s; try again when it can be reached"
            )
        log.warning("%s: %s; trying again in %.1f s", self.what, error, pause)
        time.sleep(pause)


def retried(what: str, action: Callable[[], Found], limit_s: float | None = None) -> Found:
    patience = Patience(what, limit_s)
    while True:
        try:
            return action()
        except TemporaryError as error:
            patience.wait(error)
