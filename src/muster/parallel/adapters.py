"""Where adapters train. Without torch."""

from __future__ import annotations

from muster.errors import RecipeError
from muster.parallel.layout import Layout
from muster.recipe.schema import Recipe


def refuse_adapters(recipe: Recipe, layout: Layout) -> None:
    if recipe.model.lora and (layout.zero or layout.tensor > 1 or layout.pipeline > 1):
        raise RecipeError(
            f"model.lora: adapters train under ddp, fsdp and hsdp; this is {layout}. "
            "Change distributed.strategy"
        )
