"""Python's garbage collector, paused where it would find nothing.

Importing torch and recording a model create millions of objects that stay. The collector looks through
all of them again and again, which takes a fifth of the time. Does not import torch.
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
