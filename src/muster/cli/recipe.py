"""`muster recipe`: recipes and their keys."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from muster.api.train import read_recipe
from muster.cli.common import Overrides, console

app = typer.Typer(no_args_is_help=True, help="Recipes: the settings of a run.")


@app.command("list")
def recipe_list() -> None:
    """The recipes that ship."""
    from muster.recipe.load import list_recipes

    table = Table("recipe", "what it trains")
    for name, description in list_recipes():
        table.add_row(name, description)
    console.print(table)


@app.command("show")
def recipe_show(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE")], overrides: Overrides = None
) -> None:
    """A recipe in full: every key, its value and its meaning."""
    from muster.recipe.describe import describe

    print(describe(read_recipe(recipe, list(overrides or []), console)))


@app.command("schema")
def recipe_schema() -> None:
    """The JSON schema, for editors that complete and check YAML."""
    import json

    from muster.recipe.describe import json_schema

    print(json.dumps(json_schema(), indent=2))
