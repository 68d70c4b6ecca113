"""What the files of a run directory hold: ranks and supervisors wrote them, or somebody else did."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from muster.errors import UnreadableError
from muster.reading import json_file
from muster.reading.shape import Kind, kept

Shape = dict[str, Kind]

LONGEST_LINE = 2**24  # bytes
INFO: Shape = {
    **dict.fromkeys(("state", "host", "boot", "pids", "slurm_job", "owner"), "text"),
    **dict.fromkeys(
        ("created", "begun", "ran_before_s", "owned", "ended", "pid_started"), "finite"
    ),
    **dict.fromkeys(("pid", "ranks", "restarts", "old_log"), "count"),
    "exit_code": "whole",
    "rehearsal": "flag",
    "failure": "object",
    "nodes": "texts",
}
# Given to scancel and scontrol: anything else could be an option, which ends other jobs.
JOB = re.compile(r"[0-9]{1,12}(_[0-9]{1,12})?")
FAILURE: Shape = {
    **dict.fromkeys(("what", "cause", "cure", "signal", "host"), "text"),
    **dict.fromkeys(("hang", "error"), "object"),
    "rank": "count",
    "exit_code": "whole",
    "time": "finite",
}
ERROR: Shape = {
    **dict.fromkeys(("kind", "message", "host", "trace"), "text"),
    "rank": "count",
    "expected": "flag",
    "time": "finite",
}
ERROR_REPORTS = "*.error*.json"  # in ranks/, of all attempts
ERROR_NEEDS = ("kind", "message", "expected", "time")
EVENT: Shape = {
    **dict.fromkeys(
        ("event", "split", "signal", "cause", "cure", "words", "why", "host", "metric", "better"),
        "text",
    ),
    **dict.fromkeys(("time", "seconds"), "finite"),
    **dict.fromkeys(("step", "rank", "world", "saved_by", "to"), "count"),
    "scores": "object",
    "restart": "flag",
    **dict.fromkeys(("hosts", "lines", "remarks"), "texts"),
    "examples": "list",
}
# Of each kind of event, without which nobody can use it.
EVENT_NEEDS: dict[str, tuple[str, ...]] = {
    "evaluation": ("step", "split", "scores"),
    "checkpoint": ("step",),
    "started": ("step",),
    "restarting": ("signal",),
    "node_lost": ("host", "why", "step"),
    "device_lost": ("host", "why", "step"),
    "node_joined": ("hosts", "step"),
    "shrunk": ("words",),
    "resumed": ("step",),
    "early_stop": ("step", "words"),
    "rewind": ("step", "to", "words"),
    "continuing": ("why",),
    "warning": ("words",),
}
METRICS: Shape = {
    **dict.fromkeys(("step", "samples"), "count"),
    "epoch": "finite",
    **dict.fromkeys(("loss", "grad_norm", "lr"), "number"),
    **dict.fromkeys(
        (
            *("samples_per_s", "tokens_per_s", "audio_s_per_s", "mfu", "memory_gib", "time"),
            *("step_time_s", "data_wait_s", "comm_wait_s", "compute_s"),
        ),
        "finite",
    ),
}


def event(document: Any) -> dict[str, Any]:
    """As it is if it can be used, else empty."""
    found = kept(document, EVENT, "event", "time")
    if not found or any(found.get(key) is None for key in EVENT_NEEDS.get(str(found["event"]), ())):
        return {}
    if "scores" in found:
        numbers = (int, float)
        found["scores"] = {
            name: score
            for name, score in found["scores"].items()
            if score is None or (isinstance(score, numbers) and not isinstance(score, bool))
        }
    return found


def info(document: Any) -> dict[str, Any]:
    """Of run.json."""
    found = kept(document, INFO)
    if not JOB.fullmatch(found.get("slurm_job") or ""):
        found.pop("slurm_job", None)
    if failure := found.get("failure"):
        found["failure"] = kept(failure, FAILURE)
        if error := found["failure"].get("error"):
            found["failure"]["error"] = kept(error, ERROR, *ERROR_NEEDS) or None
    return found


def error_reports(ranks: Path, names: str = ERROR_REPORTS) -> Iterator[dict[str, Any]]:
    """Of ranks that failed; what is no report is left out."""
    for path in sorted(ranks.glob(names)):
        if found := kept(document(path), ERROR, *ERROR_NEEDS):
            yield found


def document(path: Path) -> dict[str, Any]:
    """Empty where there is none, or another than an object."""
    try:
        return json_file.read(path)
    except (OSError, UnreadableError):
        return {}


def line(text: bytes, path: Path, number: int) -> dict[str, Any]:
    """Of one of a run's .jsonl files, by the file's name."""
    where = f"{path}, line {number}"
    if len(text) > LONGEST_LINE:
        raise UnreadableError(f"{where}: is longer than {LONGEST_LINE >> 20} MiB; remove it")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UnreadableError(f"{where}: is not an object of JSON; remove that line")
    return shaped(found, path)


def shaped(found: dict[str, Any], path: Path) -> dict[str, Any]:
    if path.name == "events.jsonl":
        return event(found)
    if path.name == "metrics.jsonl" or path.stem.isdigit():
        return kept(found, METRICS, "step")
    return found
