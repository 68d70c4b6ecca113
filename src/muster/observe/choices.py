"""What settings that may be `auto` came to. Kept in plan.json: a later start of the run does the same."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from muster.observe.results import write_json

PLAN_FILE = "plan.json"


@dataclass(frozen=True)
class Choice:
    """Whether something is used, and why."""

    used: bool
    reason: str
    auto: bool = True  # not the recipe's wish: the run goes on without what fails

    @classmethod
    def of_recipe(cls, used: bool) -> Choice:
        return cls(used, "the recipe says so", auto=False)

    def __str__(self) -> str:
        return f"{'yes' if self.used else 'no'}: {self.reason}"


def to_json(made: dict[str, Choice]) -> dict[str, Any]:
    return {name: asdict(choice) for name, choice in made.items()}


def write_choices(folder: Path, made: dict[str, Choice]) -> None:
    write_json(folder / PLAN_FILE, {**_plan(folder), "choices": to_json(made)})


def read_choices(folder: Path) -> dict[str, Choice]:
    """Those that `auto` made."""
    kept = {name: Choice(**values) for name, values in _plan(folder).get("choices", {}).items()}
    return {name: choice for name, choice in kept.items() if choice.auto}


def _plan(folder: Path) -> dict[str, Any]:
    path = folder / PLAN_FILE
    return dict(json.loads(path.read_text())) if path.is_file() else {}
