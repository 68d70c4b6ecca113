"""What happened at which step: evaluations, checkpoints, restarts, resumes, the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from muster.observe.evaluations import best, evaluations
from muster.page.document import Mark, Score
from muster.page.read import RunFiles

MOST_CHECKPOINTS = 200  # marks; of more, some are left out
MOST_SCORES = 400
T = TypeVar("T")


def scores(files: RunFiles) -> list[Score]:
    found, top = evaluations(files.events), best(files.events)
    chosen = (top["step"], top["split"]) if top else None
    kept = {(event["step"], event["split"]) for event in thinned(found, MOST_SCORES)} | {chosen}
    return [
        {
            "step": event["step"],
            "time": event["time"],
            "split": event["split"],
            "scores": {k: v for k, v in event["scores"].items() if v is not None},
            "best": (event["step"], event["split"]) == chosen,
            "remarks": event.get("remarks", []),
        }
        for event in found
        if (event["step"], event["split"]) in kept
    ]


def marks(files: RunFiles) -> list[Mark]:
    """In order of time."""
    found = [mark for event in files.events if (mark := _mark(event, files.events))]
    saves = [mark for mark in found if mark["kind"] == "checkpoint"]
    found = [mark for mark in found if mark["kind"] != "checkpoint"]
    return sorted(
        [*found, *thinned(saves, MOST_CHECKPOINTS), *_end(files)], key=lambda mark: mark["time"]
    )


def thinned(found: Sequence[T], most: int) -> list[T]:
    """At most so many, evenly spread, the last of them included."""
    if len(found) <= most:
        return list(found)
    return [found[(i + 1) * len(found) // most - 1] for i in range(most)]


def _mark(event: dict[str, Any], events: Sequence[dict[str, Any]]) -> Mark | None:
    match event["event"]:
        case "checkpoint":
            return _as_mark(
                "checkpoint", event, event["step"], f"checkpoint of step {event['step']}"
            )
        case "restarting":
            after = [e for e in events if e["event"] == "started" and e["time"] > event["time"]]
            step = after[0]["step"] if after else None
            words = f"rank {event.get('rank')} was killed ({event['signal']}); all ranks restarted"
            return _as_mark("restart", event, step, words)
        case "node_lost" | "device_lost":
            what = "a GPU of " if event["event"] == "device_lost" else ""
            return _as_mark("restart", event, event["step"], f"{what}{event['host']} was lost")
        case "node_joined":
            return _as_mark("restart", event, event["step"], f"{', '.join(event['hosts'])} joined")
        case "rewind":
            return _as_mark("restart", event, event["to"], event["words"])
        case "shrunk":
            return _as_mark(
                "restart" if event.get("restart") else "start", event, None, event["words"]
            )
        case "resumed":
            before, now = event.get("saved_by"), event.get("world")
            ranks = f" with {now} rank(s) instead of {before}" if before != now else ""
            return _as_mark(
                "resume", event, event["step"], f"resumed at step {event['step']}{ranks}"
            )
        case "early_stop":
            return _as_mark("stop", event, event["step"], f"training ended early: {event['words']}")
    return None


def _as_mark(kind: Any, event: dict[str, Any], step: int | None, text: str) -> Mark:
    return {"kind": kind, "step": step, "time": event["time"], "text": text}


def _end(files: RunFiles) -> list[Mark]:
    info, step = files.info, files.last.get("step")
    failure = info.get("failure") or {}
    if files.state == "failed" and failure:
        return [
            {
                "kind": "failure",
                "step": step,
                "time": failure.get("time", info.get("ended", 0.0)),
                "text": failure.get("what", ""),
            }
        ]
    if files.state == "stopped" and info.get("ended"):
        words = f"stopped at step {step}"
        return [{"kind": "stop", "step": step, "time": info["ended"], "text": words}]
    return []
