"""training_results.json: the summary of a run, with the same keys for all tasks and strategies."""

from __future__ import annotations

import os
import re
import statistics
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from muster.errors import UnreadableError
from muster.observe import shapes
from muster.reading import json_file
from muster.reading.files import open_file, open_no_link
from muster.writing import write_json as write_json

MANIFEST = "manifest.json"  # of a checkpoint, written last
STOP_FILE = "stop-requested"  # its presence asks the run to save and end
REGROUP_FILE = "regroup-requested"  # to start again with more ranks after its next checkpoint
AUDIO_FOLDER = "mistakes"  # the clips of the worst mistakes: <id>.flac


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a .jsonl file; a last line still being written is left for later."""
    return list(stream_lines(path))


def stream_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The same, one at a time: a long run's metrics are larger than what a machine likes to hold."""
    with suppress(FileNotFoundError), open_file(path) as file:
        number = 0
        while line := file.readline(shapes.LONGEST_LINE + 1):
            number += 1
            whole = line.endswith(b"\n") or len(line) > shapes.LONGEST_LINE
            if whole and (found := shapes.line(line, path, number)):
                yield found


def read_last(path: Path) -> dict[str, Any]:
    """The last whole line of a .jsonl file, or nothing; only the end of the file is read."""
    try:
        with open_no_link(path) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 16 * 1024))
            lines = file.read().split(b"\n")[:-1]
    except (OSError, UnreadableError):
        return {}
    for line in reversed(lines):
        with suppress(UnreadableError):  # truncated by a full disk
            if found := shapes.line(line, path, 0):
                return found
    return {}


def step_of(folder: Path) -> int:
    """The step of a checkpoint by the name of its folder, `step-<n>`; -1 for any other name."""
    found = re.fullmatch(r"step-(0|[1-9][0-9]*)", folder.name)
    return int(found[1]) if found else -1


def step_folders(root: Path) -> list[Path]:
    """Every `step-<n>` folder, newest first, complete or not. Other names are left alone."""
    found = [path for path in root.glob("step-*") if step_of(path) >= 0 and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def complete_steps(run: Path) -> list[int]:
    """Steps of complete checkpoints, by their manifests."""
    folders = step_folders(run / "checkpoints")
    return sorted(step_of(path) for path in folders if (path / MANIFEST).is_file())


def best_of(trainer: Mapping[str, Any]) -> int | None:
    """The best step so far, by the trainer's state in a manifest; None where none was chosen."""
    selection = trainer.get("selection")
    if not isinstance(selection, dict) or not selection.get("keeps"):
        return None
    step = selection.get("best_step")
    return step if isinstance(step, int) else None


def selection_of(root: Path) -> dict[str, Any]:
    """What the newest complete checkpoint in `root` records of the best one: there is no other mark, so a
    kill at any moment leaves a mark and a checkpoint that agree. Empty where none was chosen."""
    for folder in step_folders(root):
        with suppress(OSError, UnreadableError):
            trainer = json_file.read(folder / MANIFEST).get("trainer")
            if isinstance(trainer, dict):
                found = trainer.get("selection")
                return found if isinstance(found, dict) else {}
    return {}


def best_step(root: Path) -> int | None:
    """The step of the best checkpoint in `root`; None where none was chosen, or it is no longer there."""
    step = best_of({"selection": selection_of(root)})
    return step if step is not None and (root / f"step-{step}" / MANIFEST).is_file() else None


def summarise_metrics(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Totals over all steps of the run, restarts included. Speed is that of steps without a profiler
    and not left out, unless there are no others."""
    totals = _Totals()
    for line in lines:
        totals.add(line)
    return totals.summary()


class _Sums:
    """Over the steps whose speed counts."""

    def __init__(self) -> None:
        self.taken = array("d")  # seconds, of each
        self.samples = 0
        self.amounts: dict[str, float] = defaultdict(float)

    def add(self, line: Mapping[str, Any]) -> None:
        self.taken.append(line["step_time_s"])
        self.samples += line["samples"]
        for name, value in line.items():
            if name.endswith("_per_s") and name != "samples_per_s":
                self.amounts[name] += value * line["step_time_s"]


class _Totals:
    """One line after the other: of each, only its step time is kept."""

    def __init__(self) -> None:
        self.last: Mapping[str, Any] | None = None
        self.epochs: dict[int, float] = defaultdict(float)
        self.skipped, self.memory_gib = 0, 0.0
        self.timed, self.uncounted = _Sums(), _Sums()

    def add(self, line: Mapping[str, Any]) -> None:
        self.last = line
        self.epochs[line["epoch"]] += line["step_time_s"]
        self.skipped += bool(line.get("skipped"))
        self.memory_gib = max(self.memory_gib, line["memory_gib"])
        uncounted = line.get("profiled") or line.get("left_out")
        (self.uncounted if uncounted else self.timed).add(line)

    def summary(self) -> dict[str, Any]:
        if self.last is None:
            return {
                "steps": 0,
                "skipped_steps": 0,
                "final_loss": None,
                "epochs": [],
                "throughput": {"samples_per_s": 0.0},
                "measured": {"step_time_s": 0.0, "median_step_time_s": 0.0, "memory_gib": 0.0},
            }
        sums = self.timed if self.timed.taken else self.uncounted
        seconds = sum(sums.taken)
        throughput = {"samples_per_s": sums.samples / seconds}
        for name in self.last:
            if name in sums.amounts:
                throughput[name] = sums.amounts[name] / seconds
        return {
            "steps": self.last["step"],
            "skipped_steps": self.skipped,
            "final_loss": self.last["loss"],
            "epochs": [{"epoch": e, "time_s": t} for e, t in sorted(self.epochs.items())],
            "throughput": throughput,
            "measured": {
                "step_time_s": seconds / len(sums.taken),
                "median_step_time_s": statistics.median(sums.taken),
                "memory_gib": self.memory_gib,
            },
        }
