"""How many ranks each node of an elastic run starts."""

from __future__ import annotations

from collections.abc import Sequence

from muster.errors import LaunchError, RecipeError
from muster.parallel.layout import layout_for
from muster.recipe.batch import solve
from muster.recipe.schema import Recipe


def share(recipe: Recipe, offers: Sequence[int]) -> list[int]:
    """The most ranks, of those that each node offers, that the recipe's sizes and its global batch can be
    split over. The last nodes start fewer, or none."""
    problem: RecipeError | None = None
    for world in range(sum(offers), 0, -1):
        ranks = _first(offers, world)
        try:
            layout = layout_for(recipe.distributed, world, local_world=max(ranks))
            layout.check_sequences(recipe)
            solve(recipe.training, layout.data_ranks)
        except RecipeError as error:
            problem = problem or error
            continue
        return ranks
    raise problem or LaunchError("no node offers a rank")


def _first(offers: Sequence[int], world: int) -> list[int]:
    found, left = [], world
    for offer in offers:
        found.append(min(offer, left))
        left -= found[-1]
    return found
