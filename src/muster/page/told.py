"""What a run was told: its recipe, environment and data, and what `auto` came to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from muster.page.document import Planned, Told
from muster.page.read import RunFiles
from muster.recipe.describe import keys

AMOUNTS = ("hours", "tokens", "documents")
SOFTWARE = ("muster", "python", "torch", "cuda", "threads_per_rank")
MOST_NOTES = 50


def told(files: RunFiles) -> Told:
    environment = files.environment
    return {
        "recipe": recipe_keys(files.recipe),
        "environment": variables(files),
        "data": data_splits(files.data),
        "notes": [str(note) for note in files.data.get("notes", [])][:MOST_NOTES],
        "software": {name: environment[name] for name in SOFTWARE if name in environment},
        "choices": [
            {"key": name, "value": choice.get("used"), "reason": choice.get("reason", "")}
            for name, choice in (files.plan.get("choices") or {}).items()
            if isinstance(choice, dict)
        ],
    }


def recipe_keys(recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    known = keys()
    return [
        {"key": key, "value": value, "default": key in known and value == known[key].default}
        for key, value in _leaves(recipe, "")
    ]


def _leaves(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    known = keys()
    for name, value in node.items():
        dotted = f"{prefix}{name}"
        is_open = dotted in known and not known[dotted].is_section
        if isinstance(value, dict) and value and not is_open:
            yield from _leaves(value, f"{dotted}.")
        else:
            yield dotted, _finite(value)


def _finite(value: Any) -> Any:
    """With text for the numbers that YAML has and JSON has not: .inf and .nan."""
    if isinstance(value, dict):
        return {str(name): _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def variables(files: RunFiles) -> list[dict[str, Any]]:
    """With the reasons that the launcher wrote down."""
    told = {found["name"]: found for found in files.info.get("environment") or []}
    values = {name: found["value"] for name, found in told.items()}
    values |= files.environment.get("variables") or {}
    return [
        {
            "name": name,
            "value": value,
            "reason": told[name]["reason"] if name in told else None,
            "by": _author(told.get(name)),
        }
        for name, value in sorted(values.items())
    ]


def _author(variable: Mapping[str, Any] | None) -> str | None:
    if variable is None:
        return None
    return "user" if variable["set_by_user"] else "muster"


def data_splits(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "split": split,
            "files": found.get("files"),
            "samples": found.get("samples"),
            **{name: found.get(name) for name in AMOUNTS},
            "dropped": sum((found.get("left_out") or {}).values()),
            "left_out": found.get("left_out") or {},
        }
        for split, found in (data.get("splits") or {}).items()
    ]


def planned(files: RunFiles) -> list[Planned]:
    """Memory and step time: as planned, and as measured. Of ranks that share a GPU, no times."""
    measured = files.results.get("measured") or {}
    memory, step = files.metrics.column("memory_gib"), files.metrics.column("step_time_s")
    rows: list[Planned] = []
    for what, name, unit, values in (
        ("memory per rank", "memory_gib", "GiB", memory),
        ("step time", "step_time_s", "s", step),
    ):
        if name == "step_time_s" and files.info.get("rehearsal"):
            continue
        known = measured.get("median_step_time_s" if name == "step_time_s" else name)
        if known is None and np.isfinite(values).any():
            known = float((np.nanmedian if name == "step_time_s" else np.nanmax)(values))
        rows.append(
            {"what": what, "unit": unit, "planned": files.plan.get(name), "measured": known}
        )
    return rows
