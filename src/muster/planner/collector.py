"""Python's garbage collector, paused while most new objects stay.

Importing torch and recording a model create many of them, and the collector looks through all of them
again and again, which takes seconds. Does not import torch.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
