"""What differs between two runs: recipe, data, environment, scores, speed, curves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from muster.observe.evaluations import evaluations
from muster.observe.scores import named_scores
from muster.page.document import Comparison, FirstDifference, Ratio
from muster.page.downsample import curves
from muster.page.read import RunFiles
from muster.page.summary import SPEEDS, summary
from muster.page.told import SOFTWARE, data_splits, recipe_keys, variables

NOT_COMPARED = ("name", "description", "logging.dir")  # what a run is called, and where it is
SPLIT_FACTS = ("files", "samples", "hours", "tokens", "documents", "dropped")


def compare_runs(a: Path, b: Path) -> Comparison:
    """Of two run directories, read once."""
    first, second = RunFiles(a), RunFiles(b)
    first.refresh()
    second.refresh()
    return compare(first, second)


def compare(a: RunFiles, b: RunFiles) -> Comparison:
    return {
        "a": summary(a),
        "b": summary(b),
        "recipe": _recipe(a, b),
        "data": _different(_data(a), _data(b)),
        "environment": _different(_environment(a), _environment(b)),
        "scores": _scores(a, b),
        "speed": _speed(a, b),
        "curves": {
            "a": curves(a.metrics, a.step_times()),
            "b": curves(b.metrics, b.step_times()),
        },
        "first_difference": first_difference(a, b),
    }


def _recipe(a: RunFiles, b: RunFiles) -> list[dict[str, Any]]:
    ours, theirs = ({row["key"]: row["value"] for row in recipe_keys(f.recipe)} for f in (a, b))
    return [row for row in _different(ours, theirs) if row["key"] not in NOT_COMPARED]


def _different(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"key": key, "a": a.get(key), "b": b.get(key)}
        for key in dict.fromkeys([*a, *b])
        if a.get(key) != b.get(key)
    ]


def _data(files: RunFiles) -> dict[str, Any]:
    return {
        f"{found['split']} {name}": found[name]
        for found in data_splits(files.data)
        for name in SPLIT_FACTS
        if found[name] is not None
    }


def _environment(files: RunFiles) -> dict[str, Any]:
    facts = {name: files.environment.get(name) for name in SOFTWARE}
    devices = files.environment.get("devices")
    facts["devices"] = ", ".join(sorted({d.split(" (cuda:")[0] for d in devices or []})) or None
    facts["strategy"] = files.plan.get("strategy")
    facts["precision"] = files.plan.get("precision")
    facts["ranks"] = files.info.get("ranks")
    return facts | {found["name"]: found["value"] for found in variables(files)}


def _scores(a: RunFiles, b: RunFiles) -> list[Ratio]:
    """Those of the last evaluation of each split that both have."""

    def last(files: RunFiles) -> dict[str, dict[str, float]]:
        return {event["split"]: event["scores"] for event in evaluations(files.events)}

    ours, theirs = last(a), last(b)
    return [
        _ratio(f"{split} {name}", ours[split][name], theirs[split][name])
        for split in ours
        if split in theirs
        for name in named_scores(ours[split])
        if name in theirs[split]
    ]


def _speed(a: RunFiles, b: RunFiles) -> list[Ratio]:
    def median(files: RunFiles, name: str) -> float | None:
        values = files.metrics.column(name)
        return float(np.nanmedian(values)) if np.isfinite(values).any() else None

    names = [*SPEEDS, "step_time_s", "data_wait_s", "memory_gib", "mfu"]
    found = [_ratio(name, median(a, name), median(b, name)) for name in names]
    return [row for row in found if row["a"] is not None or row["b"] is not None]


def _ratio(name: str, a: float | None, b: float | None) -> Ratio:
    ratio = None if a is None or b is None or not a else b / a
    return {"name": name, "a": a, "b": b, "ratio": ratio}


def first_difference(a: RunFiles, b: RunFiles) -> FirstDifference | None:
    """The first step that both have and whose losses, or gradient norms, are not the same number."""
    found = [d for name in ("loss", "grad_norm") if (d := _first_different(a, b, name))]
    return min(found, key=lambda difference: difference["step"], default=None)


def _first_different(a: RunFiles, b: RunFiles, name: str) -> FirstDifference | None:
    steps, ours, theirs = np.intersect1d(
        a.metrics.column("step"), b.metrics.column("step"), return_indices=True
    )
    one, other = a.metrics.column(name)[ours], b.metrics.column(name)[theirs]
    different = np.flatnonzero((one != other) & ~(np.isnan(one) & np.isnan(other)))
    if not len(different):
        return None
    at = different[0]
    one_value, other_value = (None if np.isnan(v) else float(v) for v in (one[at], other[at]))
    return {"step": int(steps[at]), "series": name, "a": one_value, "b": other_value}
