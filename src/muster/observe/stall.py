"""When a rank counts as stalled: how long it may make no progress, by what it is doing.

Under `distributed.stall_s: auto` the phases of an optimizer step have a limit of their own, which follows
the time that steps take. A rank that waits longer looks at the heartbeats of the others: one that is alive
and within the limit of its own phase (it loads data, compiles, evaluates, saves) is waited for; one without
a heartbeat is not, whatever the phase.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from muster.observe.gather import Look
from muster.observe.heartbeats import Heartbeats

STEP_PHASES = frozenset(
    ("counting the batch", "forward and backward", "optimizer step", "waiting for the device")
)
STARTING = "starting"  # until the first beat; building and loading may take any time
ENDED = "ended"
LEAST_S = 60.0  # the limit of a step's phases where steps are short
TIMES = 20  # of the median step, where they are long
KNOWN = 3  # steps that are timed before the limit follows them: the first may compile
# A longer time between two ticks counts as so much: the process was stopped, or its disk.
PAUSE_S = 5.0
GONE_S = 20.0  # of looks without a new heartbeat, after which a rank counts as gone
LOOK_S = 1.0  # between two looks at the files themselves

Beat = tuple[str, int | None, float]  # phase, step, and when by the monotonic clock


class StallLimit:
    """Seconds without progress, by phase. `longest_s` is that of all phases unless `adaptive`."""

    def __init__(self, longest_s: float, *, adaptive: bool = False) -> None:
        self.longest_s, self.adaptive = longest_s, adaptive
        self._began: float | None = None
        self._steps: deque[float] = deque(maxlen=32)

    def step_begins(self, now: float) -> None:
        if self._began is not None:
            self._steps.append(now - self._began)
        self._began = now

    def of(self, phase: str) -> float:
        if not self.adaptive or phase not in STEP_PHASES or len(self._steps) < KNOWN:
            return self.longest_s
        return min(self.longest_s, max(LEAST_S, TIMES * statistics.median(self._steps)))


class Others:
    """The heartbeats of the other ranks, as they change from look to look. `ask` is for those that the
    collector of this node has seen; None where it does not answer: then the files are read here."""

    def __init__(
        self, folder: Path, rank: int, ask: Callable[[], Look | None] = lambda: None
    ) -> None:
        self._heartbeats, self._own, self._ask = Heartbeats(folder), rank, ask
        self._number = 0  # of the latest look that was told
        self._states: dict[int, Mapping[str, Any]] = {}
        self._unchanged: dict[int, float] = {}  # seconds of looks
        self._before: dict[int, float] = {}  # how old it was at the first look, by the clocks
        self.seen = False

    def forget(self) -> None:
        self._states, self._unchanged, self._before = {}, {}, {}
        self.seen = False

    def look(self) -> None:
        told = self._ask()
        if told is None:
            self._heartbeats.refresh()
            self._note(self._heartbeats.latest.values(), LOOK_S)
        elif told.number != self._number:
            self._number = told.number
            self._note(told.states, told.every_s)

    def _note(self, states: Iterable[Mapping[str, Any]], seconds: float) -> None:
        self.seen = True
        for state in states:
            if (rank := state["rank"]) != self._own:
                before = self._states.get(rank)
                same = before is not None and before["time"] == state["time"]
                self._unchanged[rank] = self._unchanged[rank] + seconds if same else 0.0
                if not same:
                    age = 0.0 if before else time.time() - state["time"]
                    self._before[rank] = max(0.0, age)
                self._states[rank] = state

    def at_work(self, *, starting: bool) -> bool:
        """Whether one of them is alive and within the limit of what it does, which while `starting` is none."""
        return any(
            self._unchanged[rank] < GONE_S
            and (
                (starting and state["phase"] == STARTING)
                or state["time"] - state["since"] < (state["limit_s"] or 0.0)
            )
            for rank, state in self._states.items()
            if state["phase"] != ENDED
        )

    def silent(self, seconds: float) -> bool:
        """Whether one of them has had no heartbeat for so long. Its process is stopped or gone, or native
        code holds its interpreter: a heartbeat does not wait for training. Clocks may be wrong or set anew, so
        they count for half of it at most: that was waited before the first look."""
        return any(
            (seen := self._unchanged[rank]) >= GONE_S
            and seen + min(self._before[rank], seconds / 2) >= seconds
            for rank, state in self._states.items()
            if state["phase"] != ENDED
        )


class StallWatch:
    """Asked once a tick by the thread that writes heartbeats. Time in which that thread did not run either
    (the job was suspended, the file system blocked) does not count."""

    def __init__(self, limit: StallLimit, others: Others) -> None:
        self.limit, self._others = limit, others
        self._last: Beat | None = None
        self._ticked, self._idle = time.monotonic(), 0.0

    def stalled(self, last: Beat, now: float) -> bool:
        passed, self._ticked = min(now - self._ticked, PAUSE_S), now
        if last is not self._last:
            self._last, self._idle = last, min(now - last[2], PAUSE_S)
            self._others.forget()
        else:
            self._idle += passed
        if last[0] in (STARTING, ENDED):
            return False
        limit = self.limit.of(last[0])
        if not self.limit.adaptive:
            return self._idle >= limit
        patience = min(LEAST_S, self.limit.longest_s)
        if self._idle < patience / 2:
            return False
        self._others.look()
        if not self._others.seen:  # the collector's answer takes up to two heartbeats
            return False
        if self._idle >= patience and self._others.silent(patience):
            return True
        starting = self._idle < self.limit.longest_s
        return self._idle >= limit and not self._others.at_work(starting=starting)
