"""A run's evaluations, from its events: all that still count, and the best."""

from __future__ import annotations

import math
from typing import Any, Literal, TypedDict

from muster.observe import shapes
from muster.observe.scores import MAIN, main_score


class Best(TypedDict):
    name: str  # of the score
    value: float
    step: int
    split: str
    better: Literal["min", "max"]


def evaluations(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In order of steps. Those after the checkpoint at which a run was resumed are made again, and left out."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for event in filter(None, map(shapes.event, events)):
        if event["event"] == "started":
            found = {key: one for key, one in found.items() if key[0] <= event["step"]}
        elif event["event"] == "evaluation":
            found[event["step"], event["split"]] = event
    return sorted(found.values(), key=lambda event: (event["step"], event["time"]))


def best(events: list[dict[str, Any]]) -> Best | None:
    """The best evaluation by `evaluation.metric`, else by the task's own score: on validation data, or where
    there is none, on what the run was scored on at its end."""
    scored = evaluations(events)
    found = [event for event in scored if event["split"] == "validation"] or scored
    if not found:
        return None
    name = found[-1].get("metric") or main_score(found[-1]["scores"])
    values = [
        (float(score), event)
        for event in found
        if (score := event["scores"].get(str(name))) is not None and math.isfinite(score)
    ]
    if name is None or not values:
        return None
    more = MAIN.get(name, False) if "better" not in found[-1] else found[-1]["better"] == "max"
    value, event = (max if more else min)(values, key=lambda pair: pair[0])
    return {
        "name": name,
        "value": value,
        "step": event["step"],
        "split": event["split"],
        "better": "max" if more else "min",
    }
