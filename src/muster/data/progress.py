"""How far reading data is: told to whoever asks, else logged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with the rows done and the rows in all, from any thread, one call at a time."""

QUICK_S = 1.0  # what takes less, as of cached data, is not logged


def log_tenths(log: logging.Logger, words: str) -> Progress:
    """Every tenth, as `words` with two numbers, such as `indexed %d of %d clips`, say."""
    begun, last = time.monotonic(), 0

    def report(done: int, total: int) -> None:
        nonlocal last
        tenth = 10 * done // max(total, 1)
        if tenth > last and time.monotonic() - begun > QUICK_S:
            log.info(f"{words} (%d %%)", done, total, 10 * tenth)
        last = tenth

    return report
