"""Checks that a run may resume from a checkpoint: same recipe where it changes the result, same data."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from muster.errors import CheckpointError
from muster.recipe.aliases import as_named_today
from muster.recipe.describe import keys
from muster.recipe.own_task import parse
from muster.recipe.recorded import as_recorded
from muster.recipe.schema import Recipe
from muster.recipe.training import Training
from muster.training.manifest import Saved


def refuse_other_recipe(saved: Saved, recipe: dict[str, Any]) -> None:
    """Keys that change the result must be the same; the layout may change."""
    document = saved.recipe
    with suppress(ValueError):  # newer keys get their defaults; else unchanged
        document = as_recorded(Recipe.model_validate(as_named_today(document))).as_dict()
    for key in (key.name for key in keys().values() if key.resume == "fixed"):
        before, now = _get(document, key), _get(recipe, key)
        if key == "data.lowercase":  # resolve `auto`
            before, now = (
                recipe["task"] == "speech-ctc" if x == "auto" else x for x in (before, now)
            )
        if key == "training.momentum":  # resolve null
            before, now = (Training(**d["training"]).used_momentum for d in (document, recipe))
        if key == "task":
            before, now = (_label(x) for x in (before, now))
        if before != now:
            key, before, now = _first_difference(key, before, now)
            raise CheckpointError(
                f"{saved.path} was trained with {key}={before!r}, but this recipe has {key}={now!r}; "
                "use the same value, or start a new run: muster train RECIPE"
            )

    _refuse_other_code(saved, recipe["task"])


def _label(task: str) -> str:
    own = parse(task)
    return own.label if own else task


def _refuse_other_code(saved: Saved, task: str) -> None:
    """Of a user's own task: another file is another loss."""
    own = parse(task)
    if own is None:
        return
    trained = saved.assets.get("code")
    if isinstance(trained, dict) and trained.get("sha256") != own.digest():
        raise CheckpointError(
            f"{own.file() or own.place} has changed since {saved.path} was trained with it; put the file back "
            "as it was (a checkpoint's assets.json has the text of a file), or start a new run: "
            "muster train RECIPE"
        )


def refuse_other_data(saved: Saved, data: dict[str, Any]) -> None:
    """The position in the data is a step number, so the data must be the same."""
    saved_data = saved.assets.get("data", data)
    if not isinstance(saved_data, dict) or not {"samples", "lengths"} <= set(saved_data):
        raise CheckpointError(
            f"{saved.path}: assets.json does not say of how much data it was trained on; start a new run from its "
            "weights: muster export"
        )
    if saved_data.get("shuffle", data["shuffle"]) != data["shuffle"]:
        raise CheckpointError(
            f"{saved.path} was trained with data.shuffle={saved_data['shuffle']}, and this run has "
            f"{data['shuffle']}, which `auto` takes by data.cache_gib; set data.shuffle="
            f"{saved_data['shuffle']}"
        )
    if any(saved_data[key] != data[key] for key in ("samples", "lengths")):
        raise CheckpointError(
            f"{saved.path} was trained on {saved_data['samples']} samples, and data.train now holds "
            f"{data['samples']} with other lengths; restore the data, or start a new run"
        )


def _first_difference(key: str, before: Any, now: Any) -> tuple[str, Any, Any]:
    """The first key within a section that is not the same; sizes that are not given do not count."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        given = [
            {name: x for name, x in value.items() if x is not None}
            if isinstance(value, dict)
            else value
            for value in (before, now)
        ]
        return key, given[0], given[1]
    name = next(name for name in now if before.get(name) != now[name])
    return _first_difference(f"{key}.{name}", before.get(name), now[name])


def _get(document: dict[str, Any], key: str) -> Any:
    value: Any = document
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
