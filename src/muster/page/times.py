"""Where each rank's time went, step by step: in bins for the heat map, and in full for the last steps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from muster.page.document import Heat
from muster.page.downsample import rounded
from muster.page.files import CHUNK, Growing
from muster.page.table import Floats, parse
from muster.reading.names import number

BINS = 300  # at most, and at least half as many once there are so many steps
TIMES = ("step", "compute_s", "comm_wait_s", "data_wait_s", "step_time_s")
COLUMNS = (*TIMES, "memory_gib")
RECENT = 256  # steps kept of each rank
READ_WHOLE = CHUNK  # bytes of all ranks together; of more, samples are read
READERS = 16  # threads: on shared storage each read waits for the network
HEAT_DIGITS = 4


class RankTimes:
    """The files ranks/<rank>.jsonl of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recent: dict[int, Floats] = {}  # [rows, 6]: `COLUMNS`
        self._files: dict[int, Growing] = {}
        self._bins: dict[int, Bins] = {}
        self._width = 1

    def refresh(self) -> bool:
        """Whether there was anything new."""
        for path in self.folder.glob("*.jsonl"):
            if (rank := number(path.stem)) is not None:
                self._files.setdefault(rank, Growing(path, folders=1))
        unread = {rank: file.unread() for rank, file in self._files.items()}
        ranks = [rank for rank, size in unread.items() if size]
        if not ranks:
            return False
        samples = BINS if sum(unread.values()) > READ_WHOLE else None
        with ThreadPoolExecutor(min(READERS, len(ranks))) as pool:
            read = list(pool.map(lambda rank: self._files[rank].read(samples), ranks))
        for rank, (fresh, text) in zip(ranks, read, strict=True):
            if fresh:
                self.recent[rank], self._bins[rank] = np.empty((0, len(COLUMNS))), Bins(self._width)
            self._add(rank, parse(text))
        return True

    def _add(self, rank: int, columns: dict[str, Floats]) -> None:
        if not all(name in columns for name in TIMES):
            return
        unknown = np.full(len(columns["step"]), np.nan)
        rows = np.stack([columns.get(name, unknown) for name in COLUMNS], 1)
        rows = rows[np.isfinite(rows[:, :5]).all(1) & (rows[:, 0] >= 1)]
        if not len(rows):
            return
        self.recent[rank] = np.concatenate([self.recent[rank], rows])[-RECENT:]
        steps = rows[:, 0].astype(np.int64)
        while steps.max() > self._width * BINS:
            self._width *= 2
            for bins in self._bins.values():
                bins.merge()
        self._bins[rank].add(steps, rows[:, 1:4])

    def last_step(self) -> int:
        return max((int(rows[-1, 0]) for rows in self.recent.values() if len(rows)), default=0)

    def computing(self, rank: int) -> float | None:
        """Seconds per step over the whole run, waiting for others and for data left out. Of older steps not
        all are read: each bin counts the same, and the last one by what it holds."""
        bins = self._bins.get(rank)
        if bins is None or not bins.counts.any():
            return None
        used = np.flatnonzero(bins.counts)
        weights = np.full(len(used), float(bins.width))
        weights[-1] = min(bins.width, bins.counts[used[-1]])
        return float(np.average(bins.means()[used, 0], weights=weights))

    def heat(self, ranks: list[int]) -> Heat:
        last = self.last_step()
        used = -(-last // self._width)
        empty = Bins(self._width)
        means = np.array([self._bins.get(rank, empty).means()[:used] for rank in ranks])
        edges = [min(i * self._width, last) for i in range(used + 1)]
        compute, wait, data = rounded(
            np.moveaxis(means.reshape(len(ranks), used, 3), 2, 0), HEAT_DIGITS
        )
        return {"ranks": ranks, "step": edges, "compute": compute, "wait": wait, "data": data}


class Bins:
    """Sums over `width` steps each: bin i holds steps i × width + 1 … (i + 1) × width."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.sums: NDArray[np.float64] = np.zeros((BINS, 3))
        self.counts: NDArray[np.int64] = np.zeros(BINS, np.int64)

    def add(self, steps: NDArray[np.int64], times: NDArray[np.float64]) -> None:
        """`times` [steps, 3]."""
        places = (steps - 1) // self.width
        np.add.at(self.sums, places, times)
        np.add.at(self.counts, places, 1)

    def merge(self) -> None:
        """Twice the steps in each bin."""
        half = BINS // 2
        sums, counts = np.zeros_like(self.sums), np.zeros_like(self.counts)
        sums[:half] = self.sums.reshape(half, 2, 3).sum(1)
        counts[:half] = self.counts.reshape(half, 2).sum(1)
        self.width, self.sums, self.counts = 2 * self.width, sums, counts

    def means(self) -> NDArray[np.float64]:
        """[bins, 3]; NaN where no step was read."""
        return self.sums / np.where(self.counts, self.counts, np.nan)[:, None]
