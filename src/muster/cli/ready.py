"""Before a run starts: what cannot work is refused, and its directory is made or found."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from muster.cli.common import console
from muster.errors import LaunchError

if TYPE_CHECKING:
    from io import TextIOWrapper

    from muster.recipe.schema import Recipe
    from muster.runs import Run


def existing_run(text: str, runs_elsewhere: bool = False) -> Run | None:
    """A run to go on with; None for anything else. On other nodes than 0 it may have begun already."""
    from muster import runs

    path = Path(text)
    if not (path / "run.json").is_file():
        return None
    run = runs.Run(path.resolve())
    if not runs_elsewhere and run.state() in ("queued", "starting", "running"):
        raise LaunchError(f"{run.name} is still running; watch it with `muster watch {text}`")
    return run


def _await_end(run: Run) -> None:
    """A pod that was lost leaves a run that seems to run, until nobody has touched it for a while. A
    queued one waits for just this start."""
    from muster import runs

    end = time.monotonic() + runs.STALE_S + 5.0
    while run.state() in ("starting", "running") and run.elsewhere() and time.monotonic() < end:
        time.sleep(1.0)
    if run.state() == "queued":
        run.update(state="stopped")


def open_run(
    recipe: Recipe, existing: Run | None, name: str | None, index: bool = True
) -> tuple[Run, TextIOWrapper]:
    """The run to work in, and the claim on it: a new one, or one that goes on with the maths it began
    with."""
    from muster import runs

    root = Path(recipe.logging.dir)
    if existing is None and name and (root / name / "run.json").is_file():
        _await_end(runs.Run(root / name))
        existing = existing_run(str(root / name))
    if existing:
        _check_same_maths(existing, recipe)
    if index:
        _index_speech(recipe)
    run = existing or runs.create(root, recipe.name, {}, exact=name)
    claim = run.claim()
    _write_recipe(run, recipe)
    return run, claim


def check_before_launch(recipe: Recipe, ranks: int) -> None:
    """What can be known to fail is refused before a run directory exists."""
    from muster.data import corpus
    from muster.parallel.layout import layout_for
    from muster.plan.batch import solve

    data = recipe.data
    solve(recipe.training, layout_for(recipe.distributed, ranks).data_ranks)
    corpus.check(recipe.task, data.train, data.validation, data.test)


def _index_speech(recipe: Recipe) -> None:
    """Durations are read here, once and with a bar, rather than by ranks that nobody watches."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from muster.data import corpus, index

    if corpus.CONTENT[recipe.task] != "speech":
        return
    data = recipe.data
    named = (data.train, data.validation, data.test)
    splits: tuple[corpus.Split, ...] = ("train", "validation", "test")
    paths = [p for s in splits for p in corpus.split_files(*named, s, data.max_parquet_files)]
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress("indexing durations", *columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=None)
        index.ensure_index(
            list(dict.fromkeys(paths)),
            data.audio_column,
            data.text_column,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )


def _check_same_maths(run: Run, recipe: Recipe) -> None:
    """A run goes on only with the maths it began with; asked before its recipe is replaced. One that
    was killed during its first save has no checkpoint to go on from, and begins again."""
    from muster.observe.results import complete_steps
    from muster.train.checkpoint import open_checkpoint
    from muster.train.same_maths import refuse_other_recipe

    if complete_steps(run.path):
        refuse_other_recipe(open_checkpoint(run.path, parts=0), recipe.as_dict())


def _write_recipe(run: Run, recipe: Recipe) -> None:
    from muster.recipe.describe import to_yaml

    (run.path / "recipe.yaml").write_text(to_yaml(recipe))
