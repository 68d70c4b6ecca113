"""Training from a script: started by torchrun, by plain python, or spawning its own ranks."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import psutil
import torch

from muster import run_directory
from muster.entrypoints.open_run import check_before_launch, existing_run, open_run
from muster.entrypoints.start_training import CPU_RANKS, provide
from muster.errors import LaunchError, MusterError
from muster.hardware import inventory
from muster.launch import cluster
from muster.launch.cluster import RankInfo
from muster.launch.process import exit_without_cleanup
from muster.launch.spawn import spawn
from muster.observe.console import events_to_come, follow
from muster.observe.logs import set_up
from muster.observe.profile_page import headline
from muster.observe.results_table import results_table
from muster.observe.terminal import Terminal
from muster.recipe.batch import settle_as
from muster.recipe.load import from_resolved, load
from muster.recipe.recorded import as_recorded
from muster.recipe.schema import Recipe
from muster.worker.main import TrainRank, listen_for_stop, run_process, run_rank

log = logging.getLogger(__name__)


def train_here(
    recipe: str,
    overrides: Sequence[str] = (),
    train_rank: TrainRank = run_rank,
    before: Callable[[Recipe], None] = lambda recipe: None,
    run_name: str | None = None,
) -> dict[str, Any]:
    """Train as whichever rank this process is: started by a launcher, or alone by plain python.

    `recipe` is a name, a file, or a run directory to resume; `run_name` names the run directory.
    Rank 0 shows the run in the terminal by reading its files, as `muster watch` does. `train_rank` is
    what a rank does from joining the others to leaving them; `before` may refuse the recipe before
    a run directory exists.
    """
    rank_info = cluster.detect(os.environ)
    set_up(f"Rank {rank_info.rank}")
    if rank_info.world == 1 and (words := idle_words(visible_gpus(), sys.argv)):
        log.warning("%s", words)
    listen_for_stop(rank_info)
    try:
        begun = rank_info.rank > 0 or (
            rank_info.restarts > 0 and _is_ours(run_directory.Run(Path(recipe)))
        )
        existing = existing_run(recipe, runs_elsewhere=begun)
        if existing and train_rank is not run_rank:
            raise LaunchError(
                f"{recipe} is a run of muster's own loop; give a recipe to start a new one"
            )
        source = str(existing.path / "recipe.yaml") if existing else recipe
        loaded = load(source, cluster.own_arguments(overrides))
        loaded = as_recorded(loaded) if existing else loaded
        before(loaded)
        resumed = existing is not None or rank_info.restarts > 0
        loaded = check_before_launch(loaded, rank_info.world, rank_info.local_world, resumed)
        if rank_info.rank > 0:
            return run_process(loaded, rank_info, None, train_rank=train_rank)
        run, claim, loaded = _own_run(loaded, rank_info, existing, run_name)
        with _watched(run):
            return run_process(loaded, rank_info, run, claim, train_rank)
    except MusterError as error:
        log.error("%s", error)
        exit_without_cleanup(2)  # other ranks may wait in a collective; torchrun ends them


def _own_run(
    recipe: Recipe, rank_info: RankInfo, existing: run_directory.Run | None, name: str | None
) -> tuple[run_directory.Run, TextIOWrapper, Recipe]:
    """The run directory, the claim on it and its recipe; after a restart by torchrun, the same run as
    before."""
    if rank_info.restarts:
        for run in filter(_is_ours, run_directory.every(Path(recipe.logging.dir))):
            claim = run.claim()
            run.clear_error_reports()
            first = from_resolved(run.path / "recipe.yaml").training
            return run, claim, settle_as(recipe, first)
    world, local_world = rank_info.world, rank_info.local_world
    run, claim, recipe = open_run(recipe, world, local_world, existing, name)
    run.begin(agent=_agent())
    return run, claim, recipe


def _is_ours(run: run_directory.Run) -> bool:
    """Whether the launcher that started this process also started the run's ranks before."""
    return run.info().get("agent") == _agent()


def _agent() -> list[float]:
    """The launcher's process; a container's first process has none."""
    parent = os.getppid()
    return [parent, psutil.Process(parent).create_time() if parent else 0.0]


def train_system(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """`[--config FILE] [--max-parquet-files N] [key=value …]` for the system in `folder`, which the
    paths in its configurations start from."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    default = folder / "config" / "training_config.yaml"
    parser.add_argument("--config", type=Path, default=default, metavar="FILE")
    parser.add_argument("--max-parquet-files", metavar="N", help="the first N training files")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    asked = parser.parse_intermixed_args(cluster.own_arguments(arguments))
    changes = list(asked.overrides)
    if asked.max_parquet_files:
        changes.append(f"data.max_parquet_files={asked.max_parquet_files}")
    config = asked.config.absolute()
    os.chdir(folder)
    logging.getLogger("muster.recipe.load").setLevel(
        logging.WARNING
    )  # older key names are expected here

    return train_here(str(config), changes, before=lambda recipe: provide(recipe, folder))


def train_with_trainer(recipe: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The same with Hugging Face's own Trainer instead of muster's loop."""
    return train_here(recipe, overrides, _train_with_trainer)


def _train_with_trainer(
    recipe: Recipe, rank_info: RankInfo, run: run_directory.Run | None
) -> dict[str, Any]:
    try:
        import_module("accelerate")  # transformers itself imports it only later
        from muster.entrypoints import hf_trainer
    except ImportError as error:
        raise LaunchError(
            f"Hugging Face's Trainer needs transformers and accelerate ({error}); install them with "
            "pip install 'muster-train[trainer]'"
        ) from None
    if recipe.logging.profile:
        log.warning("logging.profile: Hugging Face's Trainer has its own loop, without a profile")
    return hf_trainer.run_rank(recipe, rank_info, run)


def script_arguments(arguments: Sequence[str], recipe: Path) -> tuple[str, list[str]]:
    """`[--recipe NAME_OR_FILE] [key=value …]`; without the first, the script's own `recipe`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default=str(recipe), help="one of muster's recipes, or a file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    found = parser.parse_intermixed_args(cluster.own_arguments(arguments))
    return found.recipe, found.overrides


def visible_gpus() -> int:
    """Of either vendor, after masks such as CUDA_VISIBLE_DEVICES."""
    return torch.cuda.device_count()


def idle_words(gpus: int, command: Sequence[str]) -> str | None:
    """The warning when one process runs `command` on a machine with several GPUs."""
    if gpus < 2:
        return None
    idle = f"{gpus - 1} others are idle" if gpus > 2 else "the other one is idle"
    return (
        f"only GPU 0 of {gpus} is in use, {idle}; to use all of them: "
        f"torchrun --nproc_per_node={gpus} {shlex.join(command)}"
    )


@contextmanager
def _watched(run: run_directory.Run) -> Iterator[None]:
    """Show a run that this process is part of."""
    console, ended = Terminal(), threading.Event()

    def state() -> str:
        return "ended" if ended.is_set() else "running"

    shown = (run.path, state, console, None, events_to_come(run.path))
    watcher = threading.Thread(target=follow, args=shown, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join(5)
    if results := run.results():
        console.print(results_table(results, str(run.path)))
    if words := headline(run.path, str(run.path)):
        console.print(words, soft_wrap=True)


def train_spawned(recipe: str, overrides: Sequence[str] = ()) -> None:
    """Train on every GPU of this machine, or on a few CPU ranks without one; ranks are started by
    torch.multiprocessing. `distributed.devices` gives another number."""
    try:
        found = inventory.detect()
        asked = load(recipe, overrides).distributed.devices
        ranks = found.rank_count(asked, cpu_ranks=min(found.cpus, CPU_RANKS))
    except MusterError as error:
        sys.exit(f"error: {error}")
    spawn(train_here, (recipe, tuple(overrides)), ranks)
