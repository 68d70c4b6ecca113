"""`muster check`."""

from __future__ import annotations

import os
from pathlib import Path
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
from muster.observe.progress import working


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
    task: Annotated[
        str | None,
        typer.Option(
            metavar="FILE[:CLASS]",
            help="With --parity: a task of your own, also as package.module:CLASS.",
            show_default=False,
        ),
    ] = None,
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
        return _parity(recipe, task, overrides or [], gpus, strategy)
    if task:
        raise MusterError("--task goes with --parity")
    if strategy:
        raise MusterError("--strategy goes with --parity or --environment")

    from muster.api.check import run_checks
    from muster.launch import cluster

    node = cluster.node(os.environ, nodes or 0, node_rank, master_addr or "", master_port or 0)
    report = run_checks(recipe, overrides or [], gpus, timeout, node)

    from muster.checks.report import show
    from muster.launch.join import is_rank
    from muster.launch.process import exit_without_cleanup

    code = show(report, as_json, console) if report else 0
    if is_rank():
        exit_without_cleanup(code)
    raise typer.Exit(code)


def _parity(
    recipe: str | None,
    task: str | None,
    overrides: list[str],
    gpus: int | None,
    strategy: str | None,
) -> None:
    import tempfile

    from rich.table import Table
    from rich.text import Text

    if gpus == 1:
        raise MusterError("--parity compares ranks with one process; --gpus must be 2 or more")
    from muster.checks.parity_run import recipe_for, run_parity

    if recipe is None and overrides and "=" not in overrides[0]:
        recipe, *overrides = overrides
    with tempfile.TemporaryDirectory() as folder:
        if task:
            task = _with_class(task)
            changes = [f"task={task}"] if recipe else []
            recipe = recipe or recipe_for(task, Path(folder))
            overrides = [*changes, *overrides]
        with working("training under every strategy"):
            lines = run_parity(recipe or "gpt-micro", gpus, strategy, overrides)
    table = Table("strategy", "ranks", "loss", "gradient norm", "weights", "")
    sound, notes = True, []
    left_out: dict[str, list[str]] = {}
    for line in lines:
        if "left_out" in line:
            left_out.setdefault(line["left_out"], []).append(line["strategy"])
            continue
        if "failed" in line:
            sound = False
            table.add_row(line["strategy"], str(line["ranks"]), "", "", "", Text("failed", "red"))
            notes.append(f"{line['strategy']} failed: {line['failed']}")
            continue
        sound &= line["agrees"]
        figures = [f"{line[key]:.1e}" for key in ("loss", "norm", "weights")]
        agrees = line["agrees"]
        verdict = Text("agrees", "green") if agrees else Text("differs", "red")
        if "cause" in line:
            notes.append(f"{line['strategy']} differs: {line['cause']}")
        table.add_row(line["strategy"], str(line["ranks"]), *figures, verdict)
    console.print(table)
    console.print("largest relative difference from one process over 5 steps in float32")
    notes += [f"left out: {'; '.join(names)}: {why}" for why, names in left_out.items()]
    for note in notes:
        console.print(note, style="dim", soft_wrap=True)
    if not sound:
        raise typer.Exit(1)


def _with_class(task: str) -> str:
    """FILE, FILE:CLASS or package.module:CLASS; the only class of a file need not be named."""
    from muster.recipe.own_task import parse

    own = parse(task)
    if own is None and task.endswith(".py"):
        from muster.tasks.own import only_class

        return f"{Path(task).absolute()}:{only_class(Path(task))}"
    if own is None:
        raise MusterError(
            f"--task: got {task!r}, expected FILE.py, FILE.py:CLASS or package.module:CLASS"
        )
    return f"{Path(own.place).absolute()}:{own.name}" if own.is_file else task
