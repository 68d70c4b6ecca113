"""Statistics of repeated calls on several ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from muster.parallel.mesh import Mesh
from muster.probes.repeats import repeat

WARM_UP = 3
SMALL = 64 * 2**10  # bytes: so quick that ENOUGH repeats are always taken
ENOUGH, LEAST = 100, 10  # repeats: the p99 of fewer than 100 is the maximum
ROW_S = 0.25  # of larger arrays, roughly


@dataclass(frozen=True)
class Spread:
    """Seconds of one call. All ranks wait for the slowest, so its time is the time of a repeat."""

    median: float
    p99: float
    repeats: int


def spread(times: Sequence[float]) -> Spread:
    """p99: 99 of 100 repeats were no slower (by nearest rank)."""
    ordered = sorted(times)
    return Spread(
        statistics.median(ordered), ordered[math.ceil(0.99 * len(ordered)) - 1], len(ordered)
    )


def spread_of(mesh: Mesh, act: Callable[[], object], size: int) -> Spread:
    """Of work that all ranks do together on `size` bytes."""
    mine = repeat(
        mesh.device,
        act,
        lambda count: dist.broadcast(count, 0),
        seconds=ROW_S,
        least=ENOUGH if size <= SMALL else LEAST,
        most=ENOUGH,
        warm_up=WARM_UP,
    )
    return spread([max(each) for each in zip(*mesh.gather(mine), strict=True)])
