"""Looking after runs: watch, list, stop, clean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table
from rich.text import Text

from muster.cli.common import DirOption, RunArgument, age, console, program, shown

if TYPE_CHECKING:
    from muster.api.run import Run as ApiRun
    from muster.observe.console import Tail
    from muster.run_directory import Run


def show_until_end(run: Run, *, ranks: bool = False, events: Tail | None = None) -> None:
    """Show the run until it ends, with every rank of it if asked to; leave with its exit code. `events`
    are those to show, all by default."""
    from muster import run_directory
    from muster.launch.slurm import Follower
    from muster.observe.console import follow
    from muster.observe.failure import failure_panel
    from muster.observe.profile_page import headline
    from muster.observe.ranks import RankTable
    from muster.observe.results_table import results_table

    name, muster = shown(run), program()
    table = RankTable(run.path / "ranks") if ranks else None
    state_now = Follower(run, console.print) if run.info().get("slurm_job") else run.state
    try:
        state = follow(run.path, state_now, console, table, events)
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
        if words := headline(run.path, name):
            console.print(words, soft_wrap=True)
        if results["checkpoint"]:
            _suggest(run, state)
    run.wait_for_owner()
    if state == "stopped" and run.signalled():
        raise typer.Exit(run_directory.SIGNALLED)
    raise typer.Exit(info.get("exit_code") or (0 if state in ("finished", "stopped") else 1))


def _suggest(run: Run, state: str) -> None:
    from muster.recipe.load import from_resolved

    name, muster = shown(run), program()
    recipe = from_resolved(run.path / "recipe.yaml")
    again = f"{muster} train {name}/recipe.yaml --gpus 2"
    hear = (f"{muster} transcribe {name} FILE.wav", "transcribe a recording of yours")
    own = [(f"{muster} eval {name}", "its scores again"), (again, "the same recipe on two ranks")]
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
            (f"{muster} generate {name} --chat", "talk with it")
            if recipe.data.format == "chat" or (run.results() or {}).get("answers")
            else (f'{muster} generate {name} "def main("', "how does it go on?"),
            (f"{again} --strategy fsdp", "the model in shards on two ranks: the same losses"),
        ],
        "image-classification": [
            (f"{muster} eval {name}", "which images does it mistake?"),
            (again, "the same recipe on two ranks"),
        ],
    }.get(recipe.task, own)
    if state == "stopped":
        commands[0] = (f"{muster} train {name}", "go on from where it stopped")
    console.print("next:", style="bold")
    for command, why in commands:
        console.print(Text.assemble(f"  {command}   ", (f"# {why}", "dim")), soft_wrap=True)


def watch(
    run: RunArgument = "latest",
    dir: DirOption = Path("runs"),
    web: Annotated[bool, typer.Option("--web", help="As a page: muster page RUN.")] = False,
) -> None:
    """Follow a run, its log and how each rank fares; Ctrl-C leaves it running."""
    from muster import run_directory

    if web:
        from muster.cli.page import serve_page

        serve_page([run], dir)
        return

    show_until_end(run_directory.find(run, dir), ranks=True)


def list_runs(dir: DirOption = Path("runs")) -> None:
    """All runs, newest first."""
    import time

    from muster.api.run import runs
    from muster.observe.events import count_words

    found = runs(dir)
    if not found:
        console.print(f"no runs in {dir}; start one: {program()} train")
        return
    whole = [Column(what, no_wrap=True) for what in ("state", "age", "ranks", "step", "loss")]
    table = Table(
        Column("run", overflow="fold"), *whole, Column("best", overflow="fold", min_width=8)
    )
    for run in found:
        info, last = run.info, run.last
        loss = last.get("loss")
        table.add_row(
            run.name,
            "\n".join([run.state, *count_words(run.restarts())]),
            age(time.time() - info.get("created", 0)),
            f"{info.get('ranks', '')}{' (rehearsal)' if info.get('rehearsal') else ''}",
            str(last.get("step", "")),
            "" if not last else "not finite" if loss is None else f"{loss:.4f}",
            _best(run),
        )
    console.print(table)


def _best(run: ApiRun) -> str:
    """The best score on validation data, its step, and whether its checkpoint is there. Short: a line has
    80 columns."""
    from muster.observe.scores import score_number

    best = run.best
    if best is None or best.split != "validation":
        return ""
    kept = "" if best.checkpoint else " (not kept)"
    return f"{score_number(best.name, best.score)} at {best.step}{kept}"


def stop(
    run: RunArgument = "latest",
    dir: DirOption = Path("runs"),
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds that the run has to save and end by itself.")
    ] = 120.0,
    now: Annotated[
        bool, typer.Option("--now", help="Do not ask: end its processes, at the latest in 10 s.")
    ] = False,
) -> None:
    """Ask a run to save a checkpoint at its next step and end; end its processes if it does not."""
    from muster.api.run import Run

    found = Run(run, dir)
    how = found.stop(now=now, wait=wait)
    if how == "cancelled":
        console.print(f"{found.name} {found.state} before it began")
        return
    forced = {
        "asked": "",
        "terminated": ", after SIGTERM to its processes",
        "killed": ", its processes killed: they answered neither a request nor SIGTERM",
    }
    state = found.state
    console.print(f"{found.name} {state}{forced[how]}; {_steps_kept(found.path)}", soft_wrap=True)
    if state != "finished":
        console.print(f"go on: {program()} train {shown(found)}", soft_wrap=True)


def _steps_kept(run: Path) -> str:
    from muster.observe.results import complete_steps

    steps = complete_steps(run)
    return f"saved up to step {max(steps)}" if steps else "nothing was saved"


def clean(
    dir: DirOption = Path("runs"),
    keep: Annotated[int, typer.Option(min=0, help="Newest runs to keep.")] = 0,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove runs that have ended, after listing them. Running ones stay."""
    from muster import run_directory

    gone = run_directory.clean(dir, keep)
    if not gone:
        console.print(f"nothing to remove in {dir}")
        return
    for run in gone:
        console.print(f"  {run.name}  {run.state()}")
    if not yes and not typer.confirm(f"remove these {len(gone)} runs and their checkpoints?"):
        raise typer.Exit(1)
    for run in gone:
        run_directory.remove(run)
    console.print(f"removed {len(gone)} runs")
