"""`muster bench scaling`: how much faster are more devices, and where does the rest go?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from muster.cli.bench.common import (
    AgainstOption,
    FolderOption,
    JsonOption,
    NoRehearsalOption,
    finish,
    recipe_and,
)
from muster.cli.common import Overrides, console
from muster.errors import LaunchError
from muster.observe.progress import working

if TYPE_CHECKING:
    from muster.bench.results import Comparison


def scaling(
    recipe: Annotated[
        str, typer.Argument(metavar="[RECIPE]", help="A shipped recipe, or a YAML file.")
    ] = "gpt-micro",
    overrides: Overrides = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Up to how many ranks. Default: every GPU, or a rank per CPU core, at most 8.",
            show_default=False,
        ),
    ] = None,
    kind: Annotated[
        Literal["weak", "strong", "both"],
        typer.Option(
            help="The batch grows with the ranks, or stays; or both, one after the other."
        ),
    ] = "both",
    steps: Annotated[
        int, typer.Option(min=4, metavar="N", help="Optimizer steps of each run that count.")
    ] = 20,
    rehearse: NoRehearsalOption = None,
    folder: FolderOption = Path("runs/bench"),
    against: AgainstOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a recipe on 1, 2, 4 … devices: throughput, efficiency, and where the time went."""
    from muster.hardware import rehearsal

    rehearsal.refuse("muster bench scaling", flag=rehearse is not None)
    from muster.bench import results
    from muster.bench import scaling as bench
    from muster.bench.files import prepare
    from muster.bench.step_picture import draw_scaling
    from muster.launch.join import is_rank

    if is_rank():
        raise LaunchError("bench scaling starts its own ranks; run it without torchrun or srun")
    prepare(folder)
    before = results.earlier(against, "scaling", folder) if against else None
    kinds = ["weak", "strong"] if kind == "both" else [kind]

    recipe, changes = recipe_and(recipe, overrides)
    most = bench.most_ranks(gpus)
    with working("training", "runs") as tell:

        def say(words: str) -> None:
            if not as_json:
                with tell.paused():
                    console.print(words, style="dim")

        document = bench.measure(recipe, changes, most, kinds, steps, folder, say, tell)
    finish(document, before, folder, as_json, _show, draw_scaling)


def _show(document: dict[str, Any], comparison: Comparison | None) -> None:
    from rich.table import Table

    from muster.bench.scaling import PARTS

    rows = document["rows"]
    used = dict.fromkeys(row["strategy"] for row in rows if row["ranks"] > 1)
    console.print(
        f"{document['recipe']} ({', '.join(used) or 'one rank'}) on {document['title']}, "
        f"{document['backend']}, torch {document['torch']}",
    )
    table = Table("", "ranks", "samples\n/s", "eff.", *(head for head, _ in PARTS.values()))
    if comparison:
        table.add_column("before")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        several = len(used) > 1 and row["ranks"] > 1
        cells = [
            row["kind"] + (f", {row['strategy']}" if several else ""),
            str(row["ranks"]),
            f"{row['samples_per_s']:.4g}",
            f"{row['efficiency']:.2f}",
            *(_share(row, part) for part in PARTS),
        ]
        if comparison:
            ratio = comparison.ratios.get((row["kind"], row["ranks"]))
            cells.append(f"× {ratio:.2f}" if ratio else "–")
        table.add_row(*cells, end_section=row["ranks"] == document["ranks"])
    console.print(table)
    console.print(
        "eff.: efficiency; the rest: what each adds to a perfect step, as a share of the step "
        f"({', '.join(words for _, words in PARTS.values())})",
        style="dim",
    )


def _share(row: dict[str, Any], part: str) -> str:
    return "–" if row["ranks"] == 1 else f"{row['lost'][part] / row['step_s']:+.0%}"
