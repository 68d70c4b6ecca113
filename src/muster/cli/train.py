"""`muster train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.cli.common import Overrides, console, load_recipe, program, shown
from muster.cli.manage import show_until_end
from muster.errors import LaunchError, RecipeError

if TYPE_CHECKING:
    from muster.hardware.inventory import Inventory
    from muster.recipe.schema import Recipe
    from muster.runs import Run


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A shipped recipe, a YAML file, or a run to continue."
        ),
    ] = "speech",
    overrides: Overrides = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="N|all",
            help="Ranks: that many GPUs, or CPU ranks where there is none (all: one per core). "
            "Default: every GPU, or one process on all cores.",
            show_default=False,
        ),
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(help="Short for distributed.strategy=NAME.")
    ] = None,
    deepspeed_config: Annotated[
        Path | None,
        typer.Option(
            "--deepspeed_config",
            "--deepspeed-config",
            metavar="FILE",
            help="A ready DeepSpeed JSON, checked against the recipe; its stage is the strategy.",
            show_default=False,
        ),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Start the run and return at once.")
    ] = False,
) -> None:
    """Train. The run lives on its own: Ctrl-C or a closed terminal leaves it running."""
    from muster import runs
    from muster.hardware import inventory
    from muster.launch import local
    from muster.observe.results import STOP_FILE

    changes = list(overrides or [])
    if strategy:
        changes += _strategy(strategy, changes)
    if deepspeed_config:
        changes += _deepspeed(deepspeed_config, given=changes)
    existing = _existing_run(recipe)
    resolved = load_recipe(str(existing.path / "recipe.yaml") if existing else recipe, changes)
    found = inventory.detect()
    ranks = _ranks(resolved, gpus, found)
    _check_before_launch(resolved, ranks)
    if existing:
        _check_same_maths(existing, resolved)
    _index_speech(resolved)
    run = existing or runs.create(Path(resolved.logging.dir), resolved.name, {})
    _write_recipe(run, resolved)
    (run.path / STOP_FILE).unlink(missing_ok=True)
    run.update(state="starting", exit_code=None, failure=None)
    local.start(run, ranks)
    console.print(f"run [bold]{run.name}[/] on {_devices(found, ranks)}")
    if detach:
        console.print(f"watch it: {program()} watch {shown(run)}")
        return
    show_until_end(run)


def _strategy(name: str, given: list[str]) -> list[str]:
    """The strategy; sizes and files of another one, left in a recipe or a run, do not hold it up."""
    from muster.parallel.layout import leftovers

    told = {word.partition("=")[0] for word in given}
    others = [f"{key}={value}" for key, value in leftovers(name).items() if key not in told]
    return [f"distributed.strategy={name}", *others]


def _deepspeed(path: Path, given: list[str]) -> list[str]:
    """The file, and the strategy it means where none is asked for."""
    from muster.parallel.deepspeed_config import read

    changes = [f"distributed.deepspeed.config={path.resolve()}"]
    zero = read(path).get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, dict) else None
    asked = any(word.startswith("distributed.strategy=") for word in given)
    if stage not in (1, 2, 3) and not asked:
        raise RecipeError(
            f"{path} has no zero_optimization.stage of 1, 2 or 3; add it, or say --strategy zero2"
        )
    if not asked:
        changes.append(f"distributed.strategy=zero{stage}")
    return changes


def _existing_run(text: str) -> Run | None:
    from muster import runs

    path = Path(text)
    if not (path / "run.json").is_file():
        return None
    run = runs.Run(path.resolve())
    if run.state() in ("starting", "running"):
        raise LaunchError(f"{run.name} is still running; watch it with `muster watch {text}`")
    return run


def _ranks(recipe: Recipe, asked: str | None, found: Inventory) -> int:
    if asked == "all":
        return len(found.gpus) or found.cpus
    if asked is not None and not (asked.isdigit() and int(asked) > 0):
        raise LaunchError(f"--gpus: got {asked!r}, expected a whole number above 0, or all")
    wanted = recipe.distributed.devices
    ranks = int(asked) if asked else wanted if isinstance(wanted, int) else found.devices
    if found.gpus and ranks > len(found.gpus):
        raise LaunchError(
            f"--gpus {ranks}, but this machine offers {found.describe()}; use --gpus all"
        )
    return ranks


def _devices(found: Inventory, ranks: int) -> str:
    """What the run uses and, when something stays idle, how to use it."""
    if not found.gpus:
        share = max(1, found.cpus // ranks)
        return f"{ranks} CPU rank(s) × {share} thread(s), {found.describe()}"
    words = f"{ranks} of {found.describe()}"
    if ranks < len(found.gpus):
        words += (
            f"\n{len(found.gpus) - ranks} GPU(s) stay idle: --gpus {len(found.gpus)} uses all of them "
            "(start_training.sh: --distributed)"
        )
    return words


def _check_before_launch(recipe: Recipe, ranks: int) -> None:
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
    """A run goes on only with the maths it began with; asked before its recipe is replaced."""
    from muster.train.checkpoint import open_checkpoint, step_folders
    from muster.train.same_maths import refuse_other_recipe

    if step_folders(run.path / "checkpoints"):
        refuse_other_recipe(open_checkpoint(run.path, parts=0), recipe.as_dict())


def _write_recipe(run: Run, recipe: Recipe) -> None:
    from muster.recipe.describe import to_yaml

    (run.path / "recipe.yaml").write_text(to_yaml(recipe))
