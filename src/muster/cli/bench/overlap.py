"""`muster bench overlap`: how much of communication hides under computing?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muster.cli.bench.common import (
    AgainstOption,
    FolderOption,
    JsonOption,
    NoRehearsalOption,
    RanksOption,
    measure_and_show,
    recipe_and,
    title,
)
from muster.cli.common import Overrides, console
from muster.errors import LaunchError

if TYPE_CHECKING:
    from muster.bench.results import Comparison


def overlap(
    recipe: Annotated[
        str, typer.Argument(metavar="[RECIPE]", help="A shipped recipe, or a YAML file.")
    ] = "gpt-micro",
    overrides: Overrides = None,
    gpus: RanksOption = None,
    buckets: Annotated[
        str, typer.Option(metavar="MB,MB…", help="DDP's bucket sizes to try.")
    ] = "1,5,25,100",
    seconds: Annotated[
        float, typer.Option(min=0.1, metavar="S", help="Of each of the three times of a row.")
    ] = 2.0,
    rehearse: NoRehearsalOption = None,
    folder: FolderOption = Path("runs/bench"),
    against: AgainstOption = None,
    as_json: JsonOption = False,
) -> None:
    """How much of communication hides under computing, by DDP's buckets and FSDP's prefetching."""
    from muster.hardware import rehearsal

    rehearsal.refuse("muster bench overlap", flag=rehearse is not None)
    recipe, changes = recipe_and(recipe, overrides)
    sizes = _sizes(buckets)
    if gpus == 1:
        raise LaunchError("--gpus 1: one rank sends nothing; start at least two")

    from muster.bench.overlap import settings
    from muster.bench.step_picture import draw_overlap
    from muster.recipe.load import load

    load(recipe, changes)  # a bad name is refused before any process starts
    rows = len(list(settings(sizes)))
    measure_and_show(
        "overlap",
        {
            "recipe": recipe,
            "overrides": changes,
            "buckets": sizes,
            "seconds": seconds,
        },
        ranks=gpus,
        nodes=(None, None, None, None),
        folder=folder,
        against=against,
        as_json=as_json,
        show=_show,
        draw=draw_overlap,
        beforehand=f"{rows} settings of {3 * seconds:g} s each, and what it takes to build them …",
    )


def _sizes(text: str) -> list[float]:
    try:
        sizes = [float(word) for word in text.split(",")]
    except ValueError:
        sizes = [0.0]
    if not all(size > 0 for size in sizes):
        raise LaunchError(f"--buckets {text}: expected sizes in MB above 0, such as 1,25,100")
    return sizes


def _show(document: dict[str, Any], comparison: Comparison | None) -> None:
    from rich.table import Table

    console.print(f"{document['recipe']}: {title(document)}")
    heads = ["", "", "sent", "MB", "compute\nms", "alone\nms", "exposed\nms", "hidden"]
    table = Table(*heads, *(["before"] if comparison else []))
    for column in table.columns[2:]:
        column.justify = "right"
    last = None
    for row in document["rows"]:
        if last not in (None, row["strategy"]):
            table.add_section()
        cells = [
            row["strategy"] if row["strategy"] != last else "",
            row["setting"],
            str(row["messages"]),
            f"{row['bytes'] / 1e6:.3g}",
            *(f"{1e3 * row[f'{part}_s']:.3g}" for part in ("compute", "communication", "exposed")),
            "?" if row["hidden"] is None else f"{row['hidden']:.0%}",
        ]
        if comparison:
            ratio = comparison.ratios.get((row["strategy"], row["setting"]))
            cells.append(f"× {ratio:.2f}" if ratio else "–")
        table.add_row(*cells)
        last = row["strategy"]
    console.print(table)
    if any(row["hidden"] is None for row in document["rows"]):
        console.print(
            "?: computing varied by more than half of what the messages take, or was slower without them; give a "
            "larger model, a smaller batch, more --seconds, or an idle machine",
            style="yellow",
        )
