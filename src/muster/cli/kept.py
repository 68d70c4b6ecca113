"""`muster checkpoints`: what a run has saved, whether it is whole, and what may go."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from muster.cli.common import DirOption, RunArgument, age, console

if TYPE_CHECKING:
    from muster.run_directory import Run
    from muster.training.kept import Kept


def checkpoints(
    run: RunArgument = "latest",
    dir: DirOption = Path("runs"),
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Read every file and hold it against its checksum; exit code 1 if one is damaged.",
        ),
    ] = False,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune", help="Remove all but the newest whole ones and the best, after listing them."
        ),
    ] = False,
    keep: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="With --prune: so many of the newest. Default: checkpoint.keep of its recipe.",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """List the checkpoints of a run; verify them, or remove old ones."""
    from muster import run_directory
    from muster.errors import MusterError
    from muster.training.kept import kept_in, set_aside_in

    if (keep is not None or yes) and not prune:
        raise MusterError(
            f"{'--keep' if keep is not None else '--yes'} goes with --prune; add it, or leave it out"
        )
    found = run_directory.find(run, dir)
    root = found.path / "checkpoints"
    if prune:
        _prune(found, keep, yes)
        return
    listed = kept_in(root, verify=verify)
    if not listed:
        console.print(f"{found.name} has no checkpoint")
        return
    console.print(_table(listed, verify))
    for folder in set_aside_in(root):
        console.print(
            f"{folder.name}: the disk did not keep it as it was written; --prune removes it"
        )
    writing = found.state() in run_directory.ALIVE
    if verify and any(one.problem and (one.complete or not writing) for one in listed):
        raise typer.Exit(1)


def _table(listed: list[Kept], verified: bool) -> Table:
    whole = [Column(what, no_wrap=True) for what in ("checkpoint", "age", "size", "ranks")]
    table = Table(*whole, Column("state", overflow="fold"))
    for one in listed:
        state = ("whole" if verified else "complete") + (", the best" if one.best else "")
        table.add_row(
            one.folder.name,
            age(time.time() - one.saved) if one.saved else "",
            f"{one.bytes / 2**20:.1f} MiB",
            str(one.world or ""),
            one.problem or state,
        )
    return table


def _prune(run: Run, keep: int | None, yes: bool) -> None:
    from muster.recipe.load import from_resolved
    from muster.training.kept import old_ones
    from muster.training.manifest import remove

    newest = keep or from_resolved(run.path / "recipe.yaml").checkpoint.keep
    with run.claim():  # it does so by itself while it runs
        gone, bad = old_ones(run.path / "checkpoints", newest)
        for one in bad:
            console.print(
                f"{one.folder.name} is damaged ({one.problem}); it stays, and does not count",
                soft_wrap=True,
            )
        if not gone:
            console.print(f"nothing to remove in {run.name}")
            return
        for folder in gone:
            console.print(f"  {folder.name}")
        if not yes and not typer.confirm(f"remove these {len(gone)}?"):
            raise typer.Exit(1)
        for folder in gone:
            remove(folder)
        console.print(f"removed {len(gone)}")
