"""All trackers of a run, as the training loop sees them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from muster.observe.events import warn
from muster.observe.trackers.base import Status, TrackerRun
from muster.observe.trackers.named import label, make
from muster.observe.trackers.sender import Point, Sender, words
from muster.observe.trackers.sent import Sent

END_S = 10.0  # that the end of a run waits for its trackers
FAILED_S = 3.0  # the same after a failure


class Trackers:
    """On rank 0. Nothing here waits for a tracker, except `close`, within its limit."""

    def __init__(
        self, names: Sequence[str], folder: Path, recipe: dict[str, Any], step: int
    ) -> None:
        sent = Sent(folder) if names else None
        self._folder, self._senders = folder, list[Sender]()
        for name in names:
            assert sent is not None
            known = label(name)
            run = TrackerRun(folder.absolute().name, folder, recipe, step, sent.id_of(known))
            self._senders.append(Sender(known, partial(make, name), run, sent))
        for sender in self._senders:
            sender.start()

    def metrics(self, step: int, group: str, values: dict[str, Any]) -> None:
        self._put(Point("metrics", step, group, values))

    def evaluation(
        self, step: int, split: str, scores: dict[str, float], remarks: Sequence[str] = ()
    ) -> None:
        self._put(Point("evaluation", step, split, scores))
        if remarks:
            self._put(Point("text", step, split, "\n".join(remarks)))

    def _put(self, point: Point) -> None:
        for sender in self._senders:
            sender.put(point)

    def close(self, status: Status = "finished", limit_s: float | None = None) -> None:
        """Send what waits; what a tracker has not taken by then is told."""
        limit = limit_s if limit_s is not None else FAILED_S if status == "failed" else END_S
        until = time.monotonic() + limit
        senders, self._senders = self._senders, []
        for sender in senders:
            sender.close(status)
        for sender in senders:
            sender.join(max(0.0, until - time.monotonic()))
            if told := _lost(sender, limit):
                warn(self._folder, f"logging.to: {told}")


def _lost(sender: Sender, limit: float) -> str | None:
    """What a tracker did not get, in one sentence."""
    why = [f"{sender.failed} failed"] if sender.failed else []
    why += [f"{sender.dropped} came while its queue was full"] if sender.dropped else []
    if sender.is_alive():
        why += [f"it did not end within {limit:g} s, with {sender.waiting} in its queue"]
    if not why:
        return None
    last = f" (last error: {words(sender.error)})" if sender.error else ""
    return f"{sender.label} did not get all of {sender.taken} points: {', '.join(why)}{last}"
