"""A request to save and stop by a signal, as schedulers send it.

The handler only sets a flag. The loop checks it at the end of each step, where saving is safe.
"""

from __future__ import annotations

import signal
import threading

asked = threading.Event()


def listen(*numbers: signal.Signals) -> None:
    for number in numbers:
        signal.signal(number, lambda *_: asked.set())
