"""What a soak measures: the processes of a run and its files, and whether they stay as they are."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from muster.run_directory import Run

WARM_S = 30.0  # after its start a process still grows
SAMPLES = 40  # of the time per step, at least
STEPS = 50  # whose tenth percentile is one of them: other programs only add to it
CPU_S = 10.0  # over which the CPU time per step is taken
SURE = 3.0  # standard errors: less is noise


@dataclass(frozen=True)
class Measure:
    """`relative` and `absolute`: how much more counts as flat over the time that was observed."""

    name: str
    unit: str
    relative: float
    absolute: float
    alone: bool = False  # counts only where nothing else uses the machine


MEASURES = (
    Measure("memory of a rank", "MiB", 0.05, 8.0),
    Measure("memory of the supervisor", "MiB", 0.05, 8.0),
    Measure("file handles of a rank", "", 0.0, 2.0),
    Measure("file handles of the supervisor", "", 0.0, 2.0),
    Measure("threads of a rank", "", 0.0, 2.0),
    Measure("threads of the supervisor", "", 0.0, 2.0),
    Measure("files in the run directory", "", 0.0, 6.0),
    Measure("CPU time per step of a rank", "ms", 0.1, 0.5),
    Measure("time per step", "ms", 0.2, 0.5, alone=True),
)


@dataclass
class Series:
    """Values over time. Each `life` has its own level: a process, or the run directory."""

    lives: dict[object, list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, life: object, seconds: float, value: float) -> None:
        self.lives[life].append((seconds, value))

    def values(self) -> list[float]:
        return [value for life in self.lives.values() for _, value in life]

    def span(self) -> float:
        """Seconds of the longest life."""
        return max((life[-1][0] - life[0][0] for life in self.lives.values()), default=0.0)

    def slope(self) -> tuple[float, float]:
        """Per second, within the lives, and its standard error."""
        pairs: list[tuple[float, float]] = []
        for life in self.lives.values():
            middle = statistics.fmean(t for t, _ in life), statistics.fmean(v for _, v in life)
            pairs += [(t - middle[0], v - middle[1]) for t, v in life]
        weight = sum(t * t for t, _ in pairs)
        free = len(pairs) - len(self.lives) - 1
        if weight == 0.0 or free < 1:
            return 0.0, math.inf
        slope = sum(t * v for t, v in pairs) / weight
        left = sum((v - slope * t) ** 2 for t, v in pairs)
        return slope, math.sqrt(left / free / weight)


@dataclass(frozen=True)
class Verdict:
    """`growth`: by the slope, over the longest life."""

    measure: Measure
    samples: int
    mean: float
    per_hour: float
    growth: float
    flat: bool
    sampled: bool

    @property
    def word(self) -> str:
        return "not sampled" if not self.sampled else "flat" if self.flat else "grows"

    def problem(self, *, alone: bool) -> str:
        """A sentence; empty where there is none, or other programs may be its cause."""
        if not self.sampled:
            return (
                f"{self.measure.name} was sampled {self.samples} times, too few to tell whether it grows; "
                "soak for longer"
            )
        return (
            "" if self.flat or (self.measure.alone and not alone) else f"{self.measure.name} grows"
        )


def judge(measure: Measure, series: Series) -> Verdict:
    values = series.values()
    mean = statistics.fmean(values) if values else 0.0
    slope, error = series.slope()
    growth, sampled = slope * series.span(), math.isfinite(error)
    flat = sampled and (
        slope <= SURE * error or growth <= max(measure.absolute, measure.relative * mean)
    )
    return Verdict(measure, len(values), mean, 3600 * slope, growth, flat, sampled)


class Sampler:
    """Of one run, while it is watched."""

    def __init__(self, run: Run, warm_s: float) -> None:
        self.run, self.warm_s = run, warm_s
        self.series = {measure.name: Series() for measure in MEASURES}
        self._computed: dict[object, tuple[float, float, int]] = {}  # when, CPU seconds, step

    def sample(self, now: float) -> None:
        with suppress(psutil.Error):
            supervisor = psutil.Process(self.run.info()["pid"])
            self._process("the supervisor", supervisor, now)
            for rank in ranks_of(self.run):
                self._process("a rank", rank, now)
                self._cpu(rank, now)

    def sample_files(self, now: float) -> None:
        """While all ranks train: what a start writes is there by then."""
        files = count_files(self.run.path)
        self.series["files in the run directory"].add("run", now, files)

    def _process(self, who: str, process: psutil.Process, now: float) -> None:
        with suppress(psutil.Error):
            started = process.create_time()
            with process.oneshot():
                memory = process.memory_info().rss / 2**20
                threads, files = process.num_threads(), process.num_fds()
            if time.time() - started < self.warm_s:
                return
            life = (process.pid, started)
            self.series[f"memory of {who}"].add(life, now, memory)
            self.series[f"threads of {who}"].add(life, now, threads)
            self.series[f"file handles of {who}"].add(life, now, files)

    def _cpu(self, rank: psutil.Process, now: float) -> None:
        with suppress(psutil.Error):
            life, used = (rank.pid, rank.create_time()), rank.cpu_times()
            step = int(self.run.last_metrics().get("step", 0))
            if now - life[1] < self.warm_s:
                return
            seconds = used.user + used.system
            began, before, first = self._computed.setdefault(life, (now, seconds, step))
            if now - began >= min(CPU_S, self.warm_s) and step > first:
                taken = 1e3 * (seconds - before) / (step - first)
                self.series["CPU time per step of a rank"].add(life, now, taken)
                self._computed[life] = (now, seconds, step)

    def add_steps(self, lines: Iterable[Mapping[str, float]]) -> None:
        """The lines of metrics.jsonl, in their order."""
        times = [(line["time"], 1e3 * line["step_time_s"]) for line in lines]
        size = min(STEPS, max(2, len(times) // SAMPLES))
        for i in range(0, len(times) - size + 1, size):
            part = times[i : i + size]
            low = statistics.quantiles((taken for _, taken in part), n=10)[0]
            self.series["time per step"].add("run", part[-1][0], low)

    def verdicts(self) -> list[Verdict]:
        return [judge(measure, self.series[measure.name]) for measure in MEASURES]


def ranks_of(run: Run) -> list[psutil.Process]:
    """The processes of its ranks, in order of rank where the supervisor started them in that order."""
    found = []
    for process in run.processes()[1:]:
        with suppress(psutil.Error):
            if "muster.worker" in process.cmdline():
                found.append(process)
    return found


def count_files(folder: Path) -> int:
    """Without the checkpoints, of which there are as many as are kept."""
    return sum(
        1 for path in folder.rglob("*") if "checkpoints" not in path.parts and path.is_file()
    )


def table(title: str, verdicts: Iterable[Verdict]) -> list[str]:
    rows = [("", "samples", "mean", "slope per hour", "growth", "")]
    for found in verdicts:
        unit = f" {found.measure.unit}".rstrip()
        rows.append(
            (
                found.measure.name,
                f"{found.samples}",
                f"{found.mean:.4g}{unit}",
                f"{found.per_hour:+.3g}{unit}",
                f"{found.growth:+.3g}{unit}",
                found.word,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        title,
        *(
            "  "
            + "  ".join(
                c.ljust(w) if i == 0 else c.rjust(w)
                for i, (c, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ),
    ]
