"""`task: FILE.py:CLASS` or `package.module:CLASS`: where the code of a user's own task is, which code it
is, and its copy in the run directory. Does not import torch, nor the code."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.errors import RecipeError
from muster.reading import json_file
from muster.reading.files import expanded, is_file
from muster.recipe.schema import Recipe
from muster.writing import make_folder, write

FOLDER = "task"  # of a run directory


@dataclass(frozen=True)
class OwnTask:
    place: str  # a file, or a module's dotted name
    name: str  # of the class

    @property
    def is_file(self) -> bool:
        return self.place.endswith(".py")

    @property
    def label(self) -> str:
        """The same wherever the file is."""
        return f"{Path(self.place).name if self.is_file else self.place}:{self.name}"

    def file(self) -> Path | None:
        """Its source, if there is one."""
        if self.is_file:
            return Path(self.place)
        find_from_here()
        try:
            spec = importlib.util.find_spec(self.place)
        except (ImportError, ValueError):
            return None
        origin = spec.origin if spec else None
        return Path(origin) if origin and origin.endswith(".py") else None

    def digest(self) -> str | None:
        """SHA-256 of the source; None where it cannot be read."""
        file = self.file()
        try:
            return hashlib.sha256(file.read_bytes()).hexdigest() if file else None
        except OSError:
            return None


def parse(task: str) -> OwnTask | None:
    """None for a built-in task."""
    place, colon, name = task.rpartition(":")
    return OwnTask(place, name) if colon else None


def find_from_here() -> None:
    """Modules are found from the current directory too, as `python -m` does, by every process of a run."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def located(recipe: Recipe, folders: Sequence[Path], *, must_exist: bool = True) -> Recipe:
    """The file of its task, and those of its trackers, by their absolute paths: the first of `folders` that
    has it."""
    names = [_located("logging.to", name, folders, must_exist) for name in recipe.logging.to]
    if names != recipe.logging.to:
        recipe = recipe.model_copy(
            update={"logging": recipe.logging.model_copy(update={"to": names})}
        )
    task = _located("task", recipe.task, folders, must_exist)
    return recipe if task == recipe.task else _with_task(recipe, task)


def _located(key: str, name: str, folders: Sequence[Path], must_exist: bool) -> str:
    own = parse(name)
    if own is None or not own.is_file:
        return name
    places = [(folder / expanded(own.place)).absolute() for folder in folders]
    found = next((place for place in places if is_file(place)), places[0])
    if must_exist and not is_file(found):
        looked = " or ".join(dict.fromkeys(str(place.parent) for place in places))
        raise RecipeError(f"{key}: no file {Path(own.place).name} in {looked}")
    return f"{found}:{own.name}"


def shown(recipe: Recipe, folder: Path) -> Recipe:
    """As it is written into `folder`: a file in there by its relative path, so that a run can be moved."""
    own = parse(recipe.task)
    if own is None or not own.is_file or not Path(own.place).is_relative_to(folder.absolute()):
        return recipe
    relative = Path(own.place).relative_to(folder.absolute())
    return _with_task(recipe, f"{relative}:{own.name}")


def adopt(recipe: Recipe, run: Path) -> tuple[Recipe, dict[str, Any] | None]:
    """The recipe with the run's own copy of the task's file, made now if it is new to the run; and what
    the copy was made of. A module is not copied, only recorded."""
    own = parse(recipe.task)
    if own is None:
        return recipe, None
    record = {"from": str(own.file()), "class": own.name, "sha256": own.digest()}
    if not own.is_file:
        return recipe, record
    copy = (run / FOLDER / Path(own.place).name).absolute()
    if Path(own.place) == copy:
        return recipe, None
    make_folder(copy.parent)
    write(copy, Path(own.place).read_bytes())  # atomically: other ranks may be reading it
    return _with_task(recipe, f"{copy}:{own.name}"), record


def with_original(recipe: Recipe, record: dict[str, Any]) -> Recipe | None:
    """The recipe with the file that a run's copy was made of; None where the copy was edited itself."""
    own = parse(recipe.task)
    if own is None or own.digest() != record.get("sha256"):
        return None
    return _with_task(recipe, f"{record['from']}:{own.name}")


def original_of(file: Path) -> str | None:
    """Of a run's copy: the file that it was made of, as long as both are the same."""
    try:
        record = json_file.read(file.parents[1] / "run.json")["task"]
        found = Path(record["from"])
        same = file.parent.name == FOLDER and found.read_bytes() == file.read_bytes()
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return str(found) if same and found != file else None


def changed_original(recipe: Recipe, record: dict[str, Any], *, taken: bool = False) -> str | None:
    """What to say where the file that a run's copy was made of has changed since."""
    own = parse(recipe.task)
    if own is None or not own.is_file or record.get("from") == own.place:
        return None
    now = OwnTask(str(record.get("from")), own.name).digest()
    if now in (None, record.get("sha256")):
        return None
    if taken:
        return (
            f"{record['from']} has changed since this run began, which has no step done yet: it is taken "
            "as it is now"
        )
    return (
        f"{record['from']} has changed since this run began; the run goes on with its own copy, "
        f"{own.place}. For the changed file start a new run: muster train RECIPE"
    )


def identity(task: str) -> str:
    """The same on all machines that have the same code, wherever it lies; a built-in task's name."""
    own = parse(task)
    return task if own is None else f"{own.label} ({(own.digest() or 'no source')[:12]})"


def comparable(document: dict[str, Any]) -> dict[str, Any]:
    """A recipe's document with the task's identity in place of its path."""
    return {**document, "task": identity(document["task"])}


def _with_task(recipe: Recipe, task: str) -> Recipe:
    return recipe.model_copy(update={"task": task})
