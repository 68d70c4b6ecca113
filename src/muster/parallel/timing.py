"""Moments on a device's own clock, so that time computing and time waiting can be told apart."""

from __future__ import annotations

import time

import torch


class Moment:
    """Now, as the device sees it: the clock on a CPU, an event in the stream on a GPU.

    A GPU runs behind the program that feeds it. The event costs nothing to record and is read
    later, when the step has long finished.
    """

    __slots__ = ("event", "wall")

    def __init__(self, device: torch.device) -> None:
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()
        self.wall = time.perf_counter()

    def until(self, later: Moment) -> float:
        """Seconds from here to `later`; waits for the device to get there."""
        if self.event is not None and later.event is not None:
            later.event.synchronize()
            return self.event.elapsed_time(later.event) / 1e3
        return later.wall - self.wall
