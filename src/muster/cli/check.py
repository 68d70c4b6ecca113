"""`muster check`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from muster.cli.common import (
    AddressOption,
    NodeRankOption,
    NodesOption,
    PortOption,
    RehearseOption,
    begin_rehearsal,
    console,
)
from muster.errors import MusterError


def check(
    gpus: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Ranks here. Default: every GPU, or 2 CPU ranks."),
    ] = None,
    rehearse: RehearseOption = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Also: is this recipe's data read fast enough? With --parity: what to train.",
            show_default=False,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]…", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    timeout: Annotated[
        float, typer.Option(min=1.0, metavar="S", help="Seconds to wait for a rank, in each step.")
    ] = 30.0,
    nodes: NodesOption = None,
    node_rank: NodeRankOption = None,
    master_addr: AddressOption = None,
    master_port: PortOption = None,
    environment: Annotated[
        bool, typer.Option("--environment", help="Show the variables this hardware wants.")
    ] = False,
    export: Annotated[
        bool, typer.Option("--export", help="With --environment: as lines for a shell.")
    ] = False,
    parity: Annotated[
        bool,
        typer.Option("--parity", help="Train a small model under every strategy and compare."),
    ] = False,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With --parity: only rows that begin so; with --environment: for it.",
        ),
    ] = None,
) -> None:
    """Is this set-up fit to train on? Exit code 1 when it is not."""
    if rehearse:
        gpus = begin_rehearsal(rehearse, gpus)
    if environment or export:
        from muster.cli.environment import show_environment

        return show_environment(gpus, nodes or 1, strategy or "auto", export, master_addr)
    if parity:
        return _parity(recipe or "gpt-micro", gpus, strategy)
    if strategy:
        raise MusterError("--strategy goes with --parity or --environment")
    if overrides and not recipe:
        raise MusterError(f"{overrides[0]}: key=value changes a recipe; name it with --recipe")

    from muster.launch import cluster

    node = cluster.node(os.environ, nodes or 0, node_rank, master_addr or "", master_port or 0)
    if recipe:
        from muster.recipe.load import load

        load(recipe, overrides or [])  # a bad name is refused before any process starts

    from muster.check.context import Options
    from muster.check.report import show
    from muster.check.run import check as run_check
    from muster.launch.join import is_rank
    from muster.launch.process import exit_without_cleanup

    report = run_check(Options(timeout, recipe, overrides or []), gpus, node)
    code = show(report, as_json, console) if report else 0
    if is_rank():
        exit_without_cleanup(code)
    raise typer.Exit(code)


def _parity(recipe: str, gpus: int | None, strategy: str | None) -> None:
    from rich.table import Table

    if gpus == 1:
        raise MusterError("--parity compares ranks with one process; --gpus must be 2 or more")
    from muster.check.parity_run import run_parity

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
