"""events.jsonl: what happened in a run, and which of it were restarts and resumes."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from muster.observe import shapes
from muster.observe.results import read_last, read_lines
from muster.writing import open_own

log = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"
Kind = Literal["restarted", "resumed"]


def write_event(folder: Path, what: str, **details: Any) -> None:
    with open_own(folder / EVENTS_FILE) as file:
        file.write(json.dumps({"time": time.time(), "event": what, **details}) + "\n")


def warn(folder: Path, words: str) -> None:
    """In the log of this rank, and to whoever follows the run."""
    log.warning("%s", words)
    with suppress(OSError):  # a full disk
        write_event(folder, "warning", words=words)


def write_again(folder: Path, state: str, failure: Mapping[str, Any], signalled: bool) -> None:
    """Before a run is started again: how its last start ended, and after which step. Steps that are
    repeated disappear from metrics.jsonl. Nothing for a run that has not begun to train."""
    if not (folder / EVENTS_FILE).is_file():
        return
    why = {
        "finished": "it had finished",
        "stopped": "a signal asked it to stop" if signalled else "it was stopped",
        "failed": str(failure.get("what") or "it failed").partition("\n")[0],
        "queued": "it waited at a scheduler",
    }.get(state, "its processes were gone (killed, or the machine went down)")
    write_event(folder, "continuing", step=last_step(folder), state=state, why=why)


def last_step(folder: Path) -> int:
    return int(read_last(folder / "metrics.jsonl").get("step", 0))


@dataclass(frozen=True)
class Restart:
    """A run's start after its first: `restarted` by its supervisor, or `resumed` by a person or a scheduler.

    `step` is the last one done before, None where a run of an older version did not record it;
    `from_step` the checkpoint's that it went on from, None until it trains again.
    """

    kind: Kind
    time: float
    why: str
    step: int | None = None
    from_step: int | None = None
    cause: str | None = None
    cure: str | None = None

    def words(self) -> str:
        words = self.why.rstrip(".")
        if words.startswith("Rank "):
            words = f"r{words[1:]}"
        if self.step is not None:
            words = f"at step {self.step} {words}"
        if self.kind == "resumed":
            words = f"resumed; {words}"
        return words + (
            "; not training again yet"
            if self.from_step is None
            else f"; went on from step {self.from_step}"
            if self.from_step
            else "; began again at step 0"
        )

    def when(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))


def restarts(folder: Path) -> list[Restart]:
    return restarts_in(read_lines(folder / EVENTS_FILE))


def restarts_in(events: Iterable[Mapping[str, Any]]) -> list[Restart]:
    """In their order. One that ended again before it trained went on from nowhere, and the next start
    counts for both."""
    found: list[Restart] = []
    waiting: list[Restart] = []
    starts = 0
    for event in filter(None, map(shapes.event, events)):
        if restart := _ending(event):
            waiting.append(restart)
        elif event["event"] == "started":
            if starts and not waiting:
                waiting = [Restart("resumed", event["time"], "why is not recorded")]
            found += [_from(restart, event["step"]) for restart in waiting]
            starts, waiting = starts + 1, []
    return found + waiting


def _from(restart: Restart, step: int) -> Restart:
    return Restart(**{**vars(restart), "from_step": step})


def _ending(event: Mapping[str, Any]) -> Restart | None:
    """The event after which the run starts again, if it is one."""
    when, step = event.get("time", 0.0), event.get("step")
    match event["event"]:
        case "restarting":
            why = f"rank {event.get('rank')} was killed by {event['signal']}"
            cause, cure = event.get("cause"), event.get("cure")
            return Restart("restarted", when, why, step, cause=cause, cure=cure)
        case "node_lost" | "device_lost":
            what = "a GPU of " if event["event"] == "device_lost" else ""
            return Restart(
                "restarted", when, f"{what}{event['host']} was lost", step, cause=event["why"]
            )
        case "node_joined":
            return Restart("restarted", when, f"{', '.join(event['hosts'])} joined", step)
        case "rewind":
            why = f"the loss or the gradient norm spiked; {event['words']}"
            return Restart("restarted", when, why, step)
        case "shrunk" if event.get("restart"):
            return Restart("restarted", when, event["words"])
        case "continuing":
            return Restart("resumed", when, event["why"], step)
    return None


def worlds_in(events: Iterable[Mapping[str, Any]]) -> list[dict[str, int]]:
    """How many ranks trained from which step on, where that changed."""
    found: list[dict[str, int]] = []
    for event in events:
        if event["event"] == "started" and "world" in event:
            now = {"step": event["step"], "ranks": event["world"]}
            found = [one for one in found if one["step"] < now["step"]]
            if not found or found[-1]["ranks"] != now["ranks"]:
                found.append(now)
    return found


def count_words(found: Iterable[Restart | Mapping[str, Any]]) -> list[str]:
    """Such as `2 restarts` and `1 resume`."""
    kinds = [one.kind if isinstance(one, Restart) else one["kind"] for one in found]
    named = (("restart", "restarted"), ("resume", "resumed"))
    counted = [(name, kinds.count(kind)) for name, kind in named]
    return [f"{n} {name}{'s' if n > 1 else ''}" for name, n in counted if n]
