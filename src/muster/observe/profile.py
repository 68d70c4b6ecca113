"""A few steps under PyTorch's profiler: a trace per rank, and one page that sums them up.

    profile/rank-<r>.json.gz            a Chrome trace, for ui.perfetto.dev or chrome://tracing
    profile/summary.json, summary.txt   written by rank 0

The phases of the heartbeat are ranges in the trace, and NVTX ranges for nsys. An error in here
is only a warning: profiling never ends a run.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from muster.observe import heartbeat, trace
from muster.observe.observer import Ranks
from muster.observe.profile_page import FOLDER, page
from muster.writing import make_folder, write, write_json

log = logging.getLogger(__name__)
Result = TypeVar("Result")

SETTLE = 2  # warm-up steps before the profiler starts
NSYS = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH")  # set in whatever nsys starts


def window(asked: int, start: int, steps: int) -> tuple[int, int, int]:
    """Where the profiler starts, and the first step that is recorded and the one after the last.
    Counted from 0. A short run drops the warm-up steps first, then the last recorded ones."""
    left = steps - start
    count = max(0, min(asked, max(left - 1, 1), left))
    warm = 1 if 0 < count < left else 0
    begins = start + max(0, min(SETTLE, left - count - warm))
    return begins, begins + warm, begins + warm + count


class Profile:
    """`asked` steps under the profiler, the same ones on every rank; 0: none. `start`: steps that are
    done already, of `steps`."""

    def __init__(
        self,
        folder: Path = Path(),
        rank: int = 0,
        device: torch.device | None = None,
        asked: int = 0,
        start: int = 0,
        steps: int = 0,
    ) -> None:
        self.folder, self.rank = folder / FOLDER, rank
        self.on_gpu = device is not None and device.type == "cuda"
        self.begins, self.first, self.stop = window(asked, start, steps)
        self.notes: list[str] = []
        if 0 < steps - start < SETTLE + 1 + asked and asked:
            self.notes.append(
                f"{steps - start} step(s) are few for logging.profile={asked}: recorded "
                f"{self.stop - self.first}, after {self.first - start} that were not"
            )
        self._phases: _Phases | None = None
        self._profiler: profile | None = None
        self._open = self.stop > self.first
        self._nsys = any(name in os.environ for name in NSYS)

    def covers(self, step: int) -> bool:
        """Whether the profiler slows `step` down; the same on every rank, even if profiling failed."""
        return self.first < self.stop and self.begins <= step < self.stop

    def begin(self, step: int, ranks: Ranks) -> None:
        """Before each step."""
        if not (self._open or self._nsys):
            return
        if self._phases:
            self._phases.close()
        elif self._nsys:
            self._listen()
        if not self._open:
            return
        if step == self.stop:
            self._finish(ranks)
        elif self._profiler:
            self._guarded("record", self._profiler.step)
        elif step == self.begins:
            self._guarded("start", self._start)

    def end(self, ranks: Ranks) -> None:
        """After the last step, which may be earlier than planned."""
        if self._phases:
            self._phases.close()
        if self._open:
            self._finish(ranks)
        heartbeat.listen(None)

    def _start(self) -> None:
        kinds = [ProfilerActivity.CPU]
        if self.on_gpu:
            kinds.append(ProfilerActivity.CUDA)
        self._listen()
        plan = schedule(wait=0, warmup=self.first - self.begins, active=self.stop - self.first)
        self._profiler = profile(activities=kinds, schedule=plan)
        self._profiler.start()

    def _listen(self) -> None:
        self._phases = _Phases(nvtx=self.on_gpu)
        heartbeat.listen(self._phases)

    def _finish(self, ranks: Ranks) -> None:
        """Write what was recorded. A collective: all ranks call it after the same step, and rank 0
        gets every summary."""
        self._open = False
        if not self._nsys:
            heartbeat.listen(None)
            self._phases = None
        found = ranks.gather(self._guarded("write", self._write) if self._profiler else None)
        self._profiler = None
        if self.rank == 0:
            self._guarded("sum up", lambda: self._sum_up(found))

    def _write(self) -> dict[str, Any]:
        assert self._profiler is not None
        self._profiler.stop()
        make_folder(self.folder)
        path = self.folder / f"rank-{self.rank}.json.gz"
        plain, packed = path.with_name(f".rank-{self.rank}.json"), path.with_name(f".{path.name}")
        try:
            heartbeat.beat("writing the profile")
            self._profiler.export_chrome_trace(str(plain))
            summary = trace.summarise(_load(plain))
            heartbeat.beat("writing the profile")
            with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=4) as target:
                shutil.copyfileobj(source, target)
            os.replace(packed, path)
        finally:
            for left in self.folder.glob(
                f".rank-{self.rank}.json*"
            ):  # also the profiler's own temporary files
                left.unlink(missing_ok=True)
        return summary

    def _sum_up(self, found: list[dict[str, Any] | None]) -> None:
        ranks = [summary for summary in found if summary]
        if not ranks:
            log.warning("profile: no rank recorded a step")
            return
        notes = list(self.notes)
        if missing := [str(rank) for rank, summary in enumerate(found) if not summary]:
            notes.append(f"no trace of rank(s) {', '.join(missing)}; see ranks/{missing[0]}.log")
        if self.on_gpu and any(rank["device"] == "cpu" for rank in ranks):
            notes.append(
                "no kernels in the trace, so operators on the host are shown: CUPTI was refused, by "
                "a lack of permission or because another profiler, such as nsys, is attached"
            )
        for note in notes:
            log.warning("profile: %s", note)
        recorded = max(len(rank["steps_ms"]) for rank in ranks)
        summary = {
            "steps": [self.first + 1, self.first + recorded],
            "notes": notes,
            "all": trace.over_all(ranks),
            "ranks": [{**rank, "kernels": rank["kernels"][: trace.KERNELS]} for rank in ranks],
        }
        for path in self.folder.glob("rank-*.json.gz"):  # of an earlier attempt with more ranks
            if int(path.name.removeprefix("rank-").split(".")[0]) >= len(found):
                path.unlink()
        write_json(self.folder / "summary.json", summary)
        write(self.folder / "summary.txt", page(summary))

    def _guarded(self, what: str, action: Callable[[], Result]) -> Result | None:
        try:
            return action()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            log.warning("profile: could not %s (%s); training goes on", what, message)
            self._profiler = None
            return None


class _Phases:
    """Ranges in the timeline: each beat of the training thread ends one and opens the next."""

    def __init__(self, nvtx: bool) -> None:
        self.nvtx, self.thread = nvtx, threading.get_ident()
        self.range: record_function | None = None

    def __call__(self, phase: str) -> None:
        if threading.get_ident() != self.thread:
            return
        self.close()
        self.range = record_function(trace.PHASE + phase)
        self.range.__enter__()
        if self.nvtx:
            torch.cuda.nvtx.range_push(phase)

    def close(self) -> None:
        if self.range is not None:
            self.range.__exit__(None, None, None)
            self.range = None
            if self.nvtx:
                torch.cuda.nvtx.range_pop()


def _load(path: Path) -> dict[str, Any]:
    """What the profiler wrote; it raises nothing where the disk is full."""
    try:
        return dict(json.loads(path.read_text(errors="replace")))
    except (FileNotFoundError, ValueError) as error:
        raise OSError(f"{path} was not written whole; is the disk full?") from error
