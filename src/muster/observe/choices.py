"""What `auto` came to is kept in plan.json: a later start of the run does the same."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from muster.auto import AutoChoice
from muster.writing import write_json

PLAN_FILE = "plan.json"


def to_json(made: dict[str, AutoChoice]) -> dict[str, Any]:
    return {name: asdict(choice) for name, choice in made.items()}


def write_choices(folder: Path, made: dict[str, AutoChoice]) -> None:
    write_json(folder / PLAN_FILE, {**_plan(folder), "choices": to_json(made)})


def read_choices(folder: Path) -> dict[str, AutoChoice]:
    """The optional ones. Those of another version of muster are made anew."""
    kept = _plan(folder).get("choices", {}).items()
    fields = set(AutoChoice.__dataclass_fields__)
    found = {
        name: AutoChoice(**values)
        for name, values in kept
        if isinstance(values, dict) and set(values) == fields
    }
    return {name: choice for name, choice in found.items() if choice.optional}


def _plan(folder: Path) -> dict[str, Any]:
    path = folder / PLAN_FILE
    return dict(json.loads(path.read_text())) if path.is_file() else {}
