"""One rank's metrics: a line per step, events, and the load balance of all ranks."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import psutil
import torch

from muster.auto import AutoChoice
from muster.observe import heartbeat, stopping
from muster.observe.balance import Balance, RankTimes
from muster.observe.choices import write_choices
from muster.observe.events import write_event
from muster.observe.prometheus import Exporter
from muster.observe.results import REGROUP_FILE, STOP_FILE
from muster.observe.scores import rates
from muster.observe.step_lines import RankLines, append_after
from muster.observe.trackers.base import Status
from muster.observe.trackers.trackers import Trackers

SCORING_EVERY_S = 5.0


class Ranks(Protocol):
    """The collective that observing needs."""

    def gather(self, value: Any) -> list[Any]: ...


@dataclass(frozen=True)
class StepRecord:
    step: int  # optimizer steps completed, this one included
    epoch: int
    loss: float
    grad_norm: float
    lr: float
    samples: int  # of the whole global batch
    step_time_s: float
    data_wait_s: float
    comm_wait_s: float
    compute_s: float
    filled: int
    cells: int
    amounts: dict[str, float]  # of the whole global batch, e.g. {"audio_s": 61.5}
    skipped: bool
    profiled: bool = False  # under a profiler, and so slower: not counted
    left_out: bool = False  # nothing was computed: not counted either

    def metrics(self) -> dict[str, Any]:
        """The line of metrics.jsonl. Other programs read it: names stay."""
        line = {
            "step": self.step,
            "epoch": self.epoch,
            "loss": _finite(self.loss),
            "grad_norm": _finite(self.grad_norm),
            "lr": self.lr,
            "samples": self.samples,
            "samples_per_s": self.samples / self.step_time_s,
            "step_time_s": self.step_time_s,
            "data_wait_s": self.data_wait_s,
            "memory_gib": memory_gib(),
            "time": round(time.time(), 3),
        }
        for name, amount in self.amounts.items():
            line[f"{name}_per_s"] = amount / self.step_time_s
        if self.skipped:
            line["skipped"] = True
        if self.profiled:
            line["profiled"] = True
        if self.left_out:
            line["left_out"] = True
        return line

    def times(self) -> RankTimes:
        return (
            self.compute_s,
            self.comm_wait_s,
            self.data_wait_s,
            self.step_time_s,
            self.filled,
            self.cells,
        )


def _finite(value: float) -> float | None:
    """JSON has no NaN: null instead."""
    return value if math.isfinite(value) else None


def memory_gib() -> float:
    """Peak GPU memory of this rank; on a CPU, its current resident memory."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    return float(psutil.Process().memory_info().rss) / 2**30


class Observer:
    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        every_steps: int,
        start: int,
        world: int = 1,
        trackers: Trackers | None = None,
    ) -> None:
        self.folder, self.rank, self.every_steps = folder, rank, every_steps
        self.balance = Balance()
        self._pending: list[RankTimes] = []
        self._fresh = True
        self._ranks = RankLines(folder / "ranks" / f"{rank}.jsonl", start, rank, world)
        self._metrics: IO[str] | None = None
        self._trackers = trackers
        self.exporter: Exporter | None = None  # on one rank of each node, if asked for
        if rank == 0:
            self._metrics = append_after(folder / "metrics.jsonl", start)

    def step(self, record: StepRecord, ranks: Ranks) -> None:
        """A step's lines; with the others, at intervals."""
        self.write(record)
        if record.step % self.every_steps == 0:
            self.flush(ranks)
            if self._trackers:
                self._trackers.metrics(record.step, "balance", self.balance.summary())

    def write(self, record: StepRecord) -> None:
        line = record.metrics()
        if self._metrics:
            self._metrics.write(json.dumps(line) + "\n")
            self._metrics.flush()
        if self._trackers:
            self._trackers.metrics(record.step, "train", line)
        names = ("compute_s", "comm_wait_s", "data_wait_s", "step_time_s")
        times = dict(zip(names, record.times(), strict=False))
        times["memory_gib"] = line["memory_gib"]
        self._ranks.write(own := {"step": record.step, **times})
        heartbeat.note_line(own)
        if self._fresh:
            self._fresh = False
        elif not (record.profiled or record.left_out):
            self._pending.append(record.times())

    def flush(self, ranks: Ranks) -> None:
        """Exchange the times of recent steps. Every rank calls it at the same steps."""
        for step in zip(*ranks.gather(self._pending), strict=True):
            self.balance.add(list(step))
        self._pending = []
        self._ranks.flush()

    def scoring(
        self, split: str, step: int, *, at_once: bool = False
    ) -> Callable[[int, int], None]:
        """To be called with the batches that are scored and all of rank 0's: an event every few seconds, and
        with `at_once` before the first."""
        begin = time.monotonic()
        told = begin - SCORING_EVERY_S if at_once else begin

        def progress(done: int, batches: int) -> None:
            nonlocal told
            now = time.monotonic()
            if now - told >= SCORING_EVERY_S:
                told = now
                taken = round(now - begin, 1)
                self.event(
                    "scoring", step=step, split=split, done=done, batches=batches, seconds=taken
                )

        return progress

    def evaluation(
        self,
        step: int,
        split: str,
        scores: dict[str, float],
        remarks: Sequence[str] = (),
        **choice: Any,
    ) -> None:
        """`choice`: by which score a checkpoint is chosen, and whether this is the best so far."""
        told = {"remarks": list(remarks)} if remarks else {}
        self.event("evaluation", step=step, split=split, scores=scores, **told, **choice)
        if self._trackers:
            self._trackers.evaluation(step, split, scores, remarks)
        if self.exporter:
            self.exporter.scores[split] = rates(scores)

    def event(self, what: str, **details: Any) -> None:
        """Rank 0 writes it to events.jsonl."""
        if self.rank == 0:
            write_event(self.folder, what, **details)

    def choices(self, made: dict[str, AutoChoice]) -> None:
        """Rank 0 writes them down for a later start, and as an event."""
        if self.rank == 0:
            write_choices(self.folder, made)
            self.event("choices", **{name: str(choice) for name, choice in made.items()})

    def stop_requested(self) -> bool:
        """By `muster stop`, or by a signal to this rank."""
        return stopping.asked.is_set() or (self.rank == 0 and (self.folder / STOP_FILE).exists())

    def regroup_requested(self) -> bool:
        """By the supervisor of an elastic run, where nodes wait to take part. Rank 0 is asked."""
        return self.rank == 0 and (self.folder / REGROUP_FILE).exists()

    def end_trackers(self, status: Status) -> None:
        """Waits for them, within limits."""
        if self._trackers:
            self._trackers.close(status)

    def keep_lines(self) -> None:
        """Of a rank that fails: what is not yet in its file."""
        with suppress(OSError):  # the disk may be full
            self._ranks.flush()

    def close(self) -> None:
        self._ranks.close()
        if self._metrics:
            self._metrics.close()
        if self.exporter:
            self.exporter.close()
