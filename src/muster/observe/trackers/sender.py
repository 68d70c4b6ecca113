"""The thread that calls one tracker. Training only appends to its queue, whatever the tracker does."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from muster.observe.events import warn
from muster.observe.scores import rates
from muster.observe.trackers.base import Status, Tracker, TrackerRun
from muster.observe.trackers.sent import Sent

QUEUE = 20_000  # points; about 10 MB
EVERY_S = 1.0  # between calls of the tracker
NOT_METRICS = {"step", "time", "skipped", "profiled", "left_out"}  # of a line of metrics.jsonl


class Point(NamedTuple):
    kind: Literal["metrics", "evaluation", "text"]
    step: int
    group: str  # the first word of the metrics' names: `train`, `balance`, a split
    values: Any


class Sender(threading.Thread):
    """Daemon, so that a tracker that hangs cannot keep the process alive."""

    def __init__(self, name: str, make: Callable[[], Tracker], run: TrackerRun, sent: Sent) -> None:
        super().__init__(name=f"tracker {name}", daemon=True)
        self.label, self._make, self._run, self._sent = name, make, run, sent
        self._queue: deque[Point] = deque()
        self._closing = threading.Event()
        self._status: Status = "finished"
        self._gone = False
        self.taken = self.dropped = self.failed = 0
        self.error: BaseException | None = None

    def put(self, point: Point) -> None:
        """By the training thread; never waits."""
        if self._gone:
            return
        self.taken += 1
        if len(self._queue) >= QUEUE:
            self.dropped += 1
        else:
            self._queue.append(point)

    def close(self, status: Status) -> None:
        self._status = status
        self._closing.set()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def run(self) -> None:
        try:
            tracker = self._make()
            self._sent.started(self.label, tracker.start(self._run))
        except BaseException as error:  # a library may raise SystemExit
            self._gone, self.error = True, error
            self._queue.clear()
            self._warn(f"could not start, and the run goes on without it: {words(error)}")
            return
        closing = False
        while not closing:
            closing = self._closing.wait(EVERY_S)
            self._send(tracker)
        self._guarded(lambda: tracker.finish(self._status), 0)

    def _send(self, tracker: Tracker) -> None:
        """All that waits, which is noted as sent before it is: a run that is killed in between does not send
        it twice."""
        points = [self._queue.popleft() for _ in range(len(self._queue))]
        if not tracker.replaces_steps:
            try:
                points = self._sent.without_repeated(self.label, points)
            except OSError as error:  # a full disk
                return self._failed(error, len(points))
        given = 0
        for point in points:
            given += self._guarded(partial(_give, tracker, point), 1)
        if points:
            self._guarded(tracker.flush, given)

    def _warn(self, told: str) -> None:
        warn(self._run.folder, f"logging.to: {self.label} {told}")

    def _guarded(self, call: Callable[[], None], points: int) -> int:
        """The number of points that `call` was given, 0 after an exception; the first one is told."""
        try:
            call()
        except BaseException as error:
            self._failed(error, points)
            return 0
        return points

    def _failed(self, error: BaseException, points: int) -> None:
        self.failed += points
        if self.error is None:
            self._warn(f"failed, and the run goes on: {words(error)}")
        self.error = error


def _give(tracker: Tracker, point: Point) -> None:
    kind, step, group, values = point
    if kind == "text":
        tracker.text(step, f"{group}/remarks", values)
    elif kind == "evaluation":
        tracker.evaluation(step, group, _finite(rates(values)))
    else:
        named = {f"{group}/{n}": v for n, v in values.items() if n not in NOT_METRICS}
        tracker.metrics(step, _finite(named))


def _finite(values: dict[str, Any]) -> dict[str, float]:
    return {n: v for n, v in values.items() if isinstance(v, int | float) and math.isfinite(v)}


def words(error: BaseException) -> str:
    """On one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
