"""Which checkpoint a verb takes: its options, and what is said of the run it is in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.errors import MusterError
from muster.observe.terminal import Terminal

if TYPE_CHECKING:
    from muster.run_directory import Run

CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="best|last|step-N",
        help="Of a run. Default: the best by its validation score, else the last.",
        show_default=False,
    ),
]
AverageOption = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="The mean of so many checkpoints: the last, or with --checkpoint best the best.",
    ),
]


def checkpoint_path(checkpoint: Path, dir: Path) -> Path:
    """A path as it stands, else a run in `dir` by its name, `latest` included. Says where it is a run that
    failed, and refuses one that has no checkpoint."""
    from muster.run_directory import Run

    path = checkpoint if checkpoint.exists() else dir / checkpoint
    if (path / "run.json").is_file():
        _check_run(Run(path.resolve()))
        return path
    if not checkpoint.exists():
        raise MusterError(
            f"no checkpoint at {checkpoint}: neither a path nor a run in {dir}; `muster runs` lists them"
        )
    return checkpoint


def _check_run(run: Run) -> None:
    from muster.observe.results import complete_steps
    from muster.run_directory import every

    state, why = run.state(), ""
    if state == "failed":
        failure = run.info().get("failure") or {}
        why = f" failed: {str(failure.get('what') or 'see its log').splitlines()[0].rstrip('.')}"
    elif state == "interrupted":
        why = " was interrupted"
    steps = complete_steps(run.path)
    if steps and why:
        _say(f"{run.name}{why}; it saved up to step {max(steps)}")
    if steps:
        return
    others = (other for other in every(run.path.parent) if complete_steps(other.path))
    newest = next(others, None)
    raise MusterError(
        f"{run.name}{why or f' is {state}'}, and has no whole checkpoint; "
        + (
            f"the newest run with one is {newest.path.name}"
            if newest
            else f"neither has another run in {run.path.parent}"
        )
    )


def say_which(words: str) -> None:
    """Which checkpoint of a run was taken, apart from the output."""
    if words:
        _say(f"checkpoint: {words}")


def _say(words: str) -> None:
    Terminal(stderr=True).print(words, soft_wrap=True)


def refuse_choice(path: Path, which: str | None, average: int) -> None:
    if which is not None or average != 1:
        option = "--average" if which is None else "--checkpoint"
        raise MusterError(f"{path} is one model, not a run; leave {option} out")
