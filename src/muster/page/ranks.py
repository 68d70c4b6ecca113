"""One line per rank: its device, what it does, and where the time of its last steps went."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from muster.observe.heartbeat import ENDED, STARTING
from muster.observe.ranks import SILENT_S
from muster.page.document import RankState, Row
from muster.page.read import RunFiles
from muster.page.table import Floats

# A rank is judged by the medians of its last steps: at least three of them, since one may have waited for
# the disk, and no more than the last five seconds, so that a rank is named soon after it became slow.
WINDOW_S = 5.0
LEAST_STEPS, MOST_STEPS = 3, 64
# What ranks of equal work differ by on shared CPUs or with clips of different lengths stays below this.
SLOW = 1.3  # × the median of the others' work
SLOW_SHARE = 0.05  # of a step: a difference that costs less is not worth a word
IDLE = 0.05  # utilisation of a device that does nothing
BUSY = 0.3  # and of one that works; the meter's mean over its last ten seconds
# Outside of steps one rank may rightly be busy alone: it has one more batch to score, or writes results.
IN_A_STEP = (
    "waiting for data",
    "counting the batch",
    "forward and backward",
    "optimizer step",
    "waiting for the device",
)
IDLE_WORK = 0.03  # × the median of the others' work: one that works may well be ten times as fast as a slow one


@dataclass(frozen=True)
class Times:
    """Medians of a rank's last steps, in seconds per step."""

    compute: float
    wait: float
    data: float
    step: float

    @property
    def work(self) -> float:
        """All that is not waiting: computing, the optimizer step, and what else the rank does."""
        return max(0.0, self.step - self.wait - self.data)


def last_times(rows: Floats) -> Times | None:
    """`rows` as `RankTimes.recent` has them. None before there are enough steps."""
    if len(rows) < LEAST_STEPS:
        return None
    ends = np.cumsum(rows[::-1, 4])
    count = int(np.searchsorted(ends, WINDOW_S, "right"))
    window = rows[-min(max(count, LEAST_STEPS), MOST_STEPS) :]
    return Times(*(float(value) for value in np.median(window[:, 1:5], axis=0)))


class Compared:
    """Each rank beside the others."""

    def __init__(self, files: RunFiles) -> None:
        recent = files.times.recent
        found = {rank: last_times(recent[rank]) for rank in files.ranks if rank in recent}
        self.times = {rank: times for rank, times in found.items() if times}
        self.others_work = others_medians({rank: one.work for rank, one in self.times.items()})
        self.others_compute = others_medians(
            {rank: one.compute for rank, one in self.times.items()}
        )
        self.beats = {rank: files.heartbeats.get(rank, {}) for rank in files.ranks}
        self.alive = files.alive
        self._busiest = max(filter(None, map(self._utilisation, self.beats)), default=0.0)

    def is_slow(self, rank: int) -> bool:
        mine, others = self.times.get(rank), self.others_work.get(rank)
        if mine is None or others is None:
            return False
        return mine.work > SLOW * others and mine.work - others > SLOW_SHARE * mine.step

    def does_nothing(self, rank: int) -> bool:
        mine, others = self.times.get(rank), self.others_work.get(rank)
        return mine is not None and others is not None and mine.work < IDLE_WORK * others

    def device_idle(self, rank: int) -> bool:
        """Its device does nothing in the steps while another rank's works."""
        if not self.alive or self.beats[rank].get("phase") not in IN_A_STEP:
            return False
        mine = self._utilisation(rank)
        return mine is not None and mine < IDLE and self._busiest > BUSY

    def _utilisation(self, rank: int) -> float | None:
        found = (self.beats[rank].get("device") or {}).get("utilisation")
        return None if found is None else float(found)


def others_medians(values: Mapping[int, float]) -> dict[int, float]:
    """For each rank the median of all others; nothing for one rank alone."""
    order = sorted(values.values())
    count = len(order) - 1
    if count < 1:
        return {}

    def without(place: int, nth: int) -> float:
        return order[nth if nth < place else nth + 1]

    places = {rank: bisect_left(order, value) for rank, value in values.items()}
    middle = ((count - 1) // 2, count // 2)
    return {
        rank: (without(place, middle[0]) + without(place, middle[1])) / 2
        for rank, place in places.items()
    }


def rows(files: RunFiles, compared: Compared) -> list[Row]:
    devices = files.environment.get("devices") or []
    return [
        _row(files, rank, devices[rank] if rank < len(devices) else "", compared)
        for rank in files.ranks
    ]


def _row(files: RunFiles, rank: int, device: str, compared: Compared) -> Row:
    beat = files.heartbeats.get(rank, {})
    measured: dict[str, Any] = beat.get("device") or {}
    mine, recent = compared.times.get(rank), files.times.recent.get(rank)
    last = None if recent is None or not len(recent) else recent[-1]
    return {
        "rank": rank,
        "node": str(beat.get("host", "")),
        "device": device or str(measured.get("name", "")),
        "step": beat.get("step") if last is None else int(last[0]),
        "phase": str(beat.get("phase", "")),
        "silent_s": round(files.silent_s(rank), 1) if files.alive else 0.0,
        "utilisation": measured.get("utilisation"),
        "memory_gib": measured.get("memory_gib", _known(last)),
        "memory_total_gib": measured.get("memory_total_gib"),
        "power_w": measured.get("power_w"),
        "temperature_c": measured.get("temperature_c"),
        "compute_s": _rounded(mine.compute) if mine else None,
        "wait_s": _rounded(mine.wait) if mine else None,
        "data_s": _rounded(mine.data) if mine else None,
        "state": _state(files, rank, compared),
    }


def _known(last: Floats | None) -> float | None:
    """The memory that the rank wrote with its last step."""
    return None if last is None or np.isnan(last[5]) else _rounded(last[5])


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _state(files: RunFiles, rank: int, compared: Compared) -> RankState:
    beat = files.heartbeats.get(rank, {})
    if (files.info.get("failure") or {}).get("rank") == rank:
        return "failed"
    ended = not files.alive or beat.get("phase") == ENDED
    if not ended and files.silent_s(rank) > SILENT_S:
        return "silent"
    usual: RankState = "ended" if ended else "ok"
    if files.info.get("rehearsal") or (not ended and beat.get("phase") == STARTING):
        return usual  # ranks that share a GPU are not compared
    if compared.is_slow(rank):
        return "slow"
    idle = compared.does_nothing(rank) or compared.device_idle(rank)
    return "idle" if idle else usual
