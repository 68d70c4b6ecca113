"""`muster check`."""

from __future__ import annotations

from typing import Annotated

import typer

from muster.cli.common import console
from muster.errors import MusterError


def check(
    parity: Annotated[
        bool,
        typer.Option("--parity", help="Train a small model under every strategy and compare."),
    ] = False,
    gpus: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="Ranks. Default: every GPU, or 2 CPU ranks."),
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only the rows that begin so, e.g. fsdp.")
    ] = None,
    recipe: Annotated[str, typer.Option(help="A recipe with a language model.")] = "gpt-micro",
) -> None:
    """Is this set-up sound? Exit code 1 when it is not."""
    from rich.table import Table

    from muster.check.run import run_parity

    if not parity:
        raise MusterError("say what to check: muster check --parity")
    table = Table("strategy", "ranks", "loss", "gradient norm", "weights", "")
    sound, notes = True, []
    for line in run_parity(recipe, gpus, strategy):
        if "left_out" in line:
            notes.append(f"{line['strategy']} left out: {line['left_out']}")
            continue
        sound &= line["agrees"]
        figures = [f"{line[key]:.1e}" for key in ("loss", "norm", "weights")]
        verdict = "[green]agrees" if line["agrees"] else "[red]differs"
        table.add_row(line["strategy"], str(line["ranks"]), *figures, verdict)
    console.print(table)
    console.print("largest relative difference from one process over 5 steps in float32")
    for note in notes:
        console.print(f"[dim]{note}[/]", soft_wrap=True)
    if not sound:
        raise typer.Exit(1)
