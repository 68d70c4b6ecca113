"""Timestamps on a device's clock, to separate computation from waiting."""

from __future__ import annotations

import time

import torch


class DeviceTimestamp:
    """The current time of a device: the clock on a CPU, a CUDA event on a GPU.

    A GPU runs asynchronously. Recording the event costs nothing; it is read after the step.
    """

    __slots__ = ("event", "wall")

    def __init__(self, device: torch.device) -> None:
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()
        self.wall = time.perf_counter()

    def until(self, later: DeviceTimestamp) -> float:
        """Seconds from here to `later`; synchronizes with the device."""
        if self.event is not None and later.event is not None:
            later.event.synchronize()
            return self.event.elapsed_time(later.event) / 1e3
        return later.wall - self.wall
