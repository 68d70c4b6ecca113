"""Repeated calls on several ranks, each timed on the device's own clock."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from muster.parallel.timestamps import DeviceTimestamp


def times(device: torch.device, act: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of `count` calls, one straight after the other."""
    marks = [DeviceTimestamp(device)]
    for _ in range(count):
        act()
        marks.append(DeviceTimestamp(device))
    return [before.until(after) for before, after in pairwise(marks)]


def repeat(
    device: torch.device,
    act: Callable[[], object],
    broadcast_count: Callable[[Tensor], object],
    *,
    seconds: float,
    least: int,
    most: int,
    warm_up: int = 2,
) -> list[float]:
    """As many calls as fit into `seconds`, by the time of the last of `warm_up` calls, which do not count:
    the first only sets up connections. `broadcast_count` gives all ranks the same count."""
    once = times(device, act, warm_up)[-1]
    fitting = max(least, min(most, int(seconds / max(once, 1e-9))))
    count = torch.tensor([fitting], device=device)
    broadcast_count(count)
    return times(device, act, int(count))
