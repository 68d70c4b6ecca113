"""The same work again and again on several ranks, each time timed on the device's own clock."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from muster.parallel.timing import Moment


def times(device: torch.device, act: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of `count` calls, one straight after the other."""
    marks = [Moment(device)]
    for _ in range(count):
        act()
        marks.append(Moment(device))
    return [before.until(after) for before, after in pairwise(marks)]


def repeat(
    device: torch.device,
    act: Callable[[], object],
    tell: Callable[[Tensor], object],
    *,
    seconds: float,
    least: int,
    most: int,
    warm_up: int = 2,
) -> list[float]:
    """As many as fit into `seconds`, by the time of the last of `warm_up` calls, which do not count:
    the first only sets up connections. `tell` makes all who act agree on how many."""
    once = times(device, act, warm_up)[-1]
    fitting = max(least, min(most, int(seconds / max(once, 1e-9))))
    count = torch.tensor([fitting], device=device)
    tell(count)
    return times(device, act, int(count))
