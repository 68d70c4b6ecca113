"""Looking after runs: watch, list, stop, clean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from muster.cli.common import DirOption, RunArgument, console, program, shown
from muster.errors import MusterError

if TYPE_CHECKING:
    from muster.runs import Run


def show_until_end(run: Run) -> None:
    """Show the run until it ends, then leave with its exit code."""
    from muster.observe.console import failure_panel, follow, results_table

    name, muster = shown(run), program()
    try:
        state = follow(run.path, run.state, console)
    except KeyboardInterrupt:
        console.print(f"\n{run.name} goes on.")
        console.print(f"come back: {muster} watch {name}\nend it:    {muster} stop {name}")
        raise typer.Exit(130) from None
    info, results = run.info(), run.results()
    if state == "failed":
        console.print(failure_panel(info["failure"], name))
    elif state == "interrupted":
        console.print(f"{run.name} was interrupted; go on: {muster} train {name}", soft_wrap=True)
    elif results:
        console.print(results_table(results, name))
        _suggest(run, state)
    raise typer.Exit(info.get("exit_code") or (0 if state in ("finished", "stopped") else 1))


def _suggest(run: Run, state: str) -> None:
    from muster.recipe.load import from_resolved

    name, muster = shown(run), program()
    recipe = from_resolved(run.path / "recipe.yaml")
    again = f"{muster} train {name}/recipe.yaml --gpus 2"
    hear = (f"{muster} transcribe {name} FILE.wav", "what does it hear in a recording of yours?")
    commands = {
        "speech-ctc": [
            hear,
            (
                f"{muster} eval {name} --decoder greedy",
                "its worst mistakes, without a language model",
            ),
            (again, "the same recipe on two ranks: the same losses"),
        ],
        "speech-seq2seq": [
            hear,
            (f"{muster} eval {name} --decoder beam", "its worst mistakes, with beam search"),
            (f"{muster} export {name} FOLDER", "for transformers and its pipelines"),
        ],
        "causal-lm": [
            (f'{muster} generate {name} "def main("', "how does it go on?"),
            (f"{again} --strategy fsdp", "the model in shards on two ranks: the same losses"),
        ],
        "image-classification": [
            (f"{muster} eval {name}", "which images does it mistake?"),
            (again, "the same recipe on two ranks"),
        ],
    }[recipe.task]
    if state == "stopped":
        commands[0] = (f"{muster} train {name}", "go on from where it stopped")
    console.print("[bold]next:[/]")
    for command, why in commands:
        console.print(f"  {command}   [dim]# {why}[/]", soft_wrap=True)


def watch(run: RunArgument = "latest", dir: DirOption = Path("runs")) -> None:
    """Follow a run; Ctrl-C leaves it running."""
    from muster import runs

    show_until_end(runs.find(run, dir))


def list_runs(dir: DirOption = Path("runs")) -> None:
    """All runs, newest first."""
    import time

    from muster import runs

    table = Table("run", "state", "age", "ranks", "step", "loss")
    for run in runs.every(dir):
        info, last = run.info(), run.last_metrics()
        age = f"{(time.time() - info.get('created', 0)) / 60:.0f} min"
        loss = f"{last['loss']:.4f}" if last else ""
        table.add_row(
            run.name, run.state(), age, str(info.get("ranks", "")), str(last.get("step", "")), loss
        )
    console.print(table)


def stop(
    run: RunArgument = "latest",
    dir: DirOption = Path("runs"),
    wait: Annotated[float, typer.Option(help="Seconds to wait for it to end.")] = 120.0,
) -> None:
    """Ask a run to save a checkpoint at its next step and end."""
    import time

    from muster import runs
    from muster.observe.results import STOP_FILE

    found = runs.find(run, dir)
    if found.state() not in ("starting", "running"):
        raise MusterError(f"{found.name} is not running: it is {found.state()}")
    (found.path / STOP_FILE).touch()
    limit = time.monotonic() + wait
    while found.state() in ("starting", "running"):
        if time.monotonic() > limit:
            raise MusterError(
                f"{found.name} has not ended after {wait:.0f} s; its log: {shown(found)}/ranks/0.log"
            )
        time.sleep(0.2)
    console.print(f"{found.name} {found.state()}; go on: {program()} train {shown(found)}")


def clean(
    dir: DirOption = Path("runs"),
    keep: Annotated[int, typer.Option(min=0, help="Newest runs to keep.")] = 0,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove runs that have ended, after listing them. Running ones stay."""
    from muster import runs

    gone = runs.clean(dir, keep)
    if not gone:
        console.print(f"nothing to remove in {dir}")
        return
    for run in gone:
        console.print(f"  {run.name}  {run.state()}")
    if not yes and not typer.confirm(f"remove these {len(gone)} runs and their checkpoints?"):
        raise typer.Exit(1)
    for run in gone:
        runs.remove(run)
    console.print(f"removed {len(gone)} runs")
