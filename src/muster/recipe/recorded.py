"""Recipes that runs recorded in full, read by a later muster.

A new key's default is for new runs. Where it computes something else than before the key existed, a
recorded recipe without the key means what was computed then.
"""

from __future__ import annotations

from muster.recipe.schema import Recipe
from muster.workloads import workload


def as_recorded(recipe: Recipe) -> Recipe:
    """`recipe` as the run that recorded it was trained."""
    data = recipe.data
    if not workload(recipe.task).packed or "sequence_packing" in data.model_fields_set:
        return recipe
    before = data.model_copy(update={"sequence_packing": "fixed"})
    return recipe.model_copy(update={"data": before})
