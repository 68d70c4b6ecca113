"""Loss spikes: steps whose loss or gradient norm is far above that of the steps before them.

A step's limits are known before it is launched, so its update can be skipped on the device. On a GPU the
results of a step are read after the next one was launched: limits use steps up to the one before the last,
whatever the device, and so are the same on every rank, device and world.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from muster.errors import UnreadableError
from muster.reading import json_file

WINDOW = 128  # steps
LEAST = 32  # steps, before which there is no limit
BEHIND = 2  # the newest step that counts is this many before the one that is judged
SMALLEST = 1e-3  # of the mean: a smaller deviation counts as this, so that rounding is no spike


@dataclass(frozen=True)
class Limits:
    """A step above one of them is a spike."""

    loss: float = math.inf
    grad_norm: float = math.inf


class History:
    """The losses and gradient norms of the last steps."""

    def __init__(self, deviations: float = 6.0) -> None:
        self.deviations = deviations
        self._steps: deque[tuple[int, float, float]] = deque(maxlen=WINDOW + BEHIND)

    def limits(self, step: int) -> Limits:
        """Of a step, counted from 0."""
        counted = [values for values in self._steps if values[0] <= step - BEHIND][-WINDOW:]
        if len(counted) < LEAST:
            return Limits()
        return Limits(*(self._limit(values) for values in list(zip(*counted, strict=True))[1:]))

    def _limit(self, values: Sequence[float]) -> float:
        mean = math.fsum(values) / len(values)
        variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
        return mean + self.deviations * max(math.sqrt(variance), SMALLEST * abs(mean))

    def add(self, step: int, loss: float, grad_norm: float, limits: Limits) -> None:
        """A spike counts with its limit: one does not hide the next, and a new level is taken in time. What is
        not finite does not count."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._steps.append((step, min(loss, limits.loss), min(grad_norm, limits.grad_norm)))

    def state(self) -> str:
        """One line of a checkpoint's manifest."""
        return json.dumps(list(self._steps))

    def load(self, state: str) -> None:
        """Begins anew where a checkpoint, of an older version, has nothing that can be read."""
        self._steps.clear()
        with suppress(UnreadableError, TypeError, ValueError):
            found = json_file.parse_value(state, "the history of losses")
            self._steps.extend((int(step), float(loss), float(norm)) for step, loss, norm in found)
