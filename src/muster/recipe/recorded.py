"""Recipes that runs recorded in full, read by a later muster.

A new key's default is for new runs. Where it computes something else than before the key existed, a
recorded recipe without the key means what was computed then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.recipe.schema import Recipe
from muster.workloads import workload


def as_recorded(recipe: Recipe) -> Recipe:
    """`recipe` as the run that recorded it was trained."""
    data = recipe.data
    if not workload(recipe.task).packed or "sequence_packing" in data.model_fields_set:
        return recipe
    before = data.model_copy(update={"sequence_packing": "fixed"})
    return recipe.model_copy(update={"data": before})


def as_begun(recipe: Recipe, document: Mapping[str, Any]) -> Recipe:
    """`recipe` for a run that was trained by the recipe `document`: what it leaves open as it was there."""
    packing = (document.get("data") or {}).get("sequence_packing", "fixed")
    return as_recorded(recipe) if packing == "fixed" else recipe
