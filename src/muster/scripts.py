"""Training from a script: started by torchrun, by plain python, or spawning its own ranks."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console

from muster import runs
from muster.errors import LaunchError, MusterError
from muster.hardware import inventory
from muster.launch import cluster
from muster.launch.cluster import Place
from muster.launch.rank import settle, speaking_for
from muster.launch.spawn import spawn
from muster.observe import stopping
from muster.observe.console import follow, results_table
from muster.observe.logs import set_up
from muster.observe.profile_page import headline
from muster.recipe.describe import to_yaml
from muster.recipe.load import load
from muster.recipe.schema import Recipe
from muster.start import provide
from muster.worker.main import run_rank

log = logging.getLogger(__name__)

RankLife = Callable[[Recipe, Place, runs.Run | None], dict[str, Any]]


def train_here(
    recipe: str,
    overrides: Sequence[str] = (),
    life: RankLife = run_rank,
    before: Callable[[Recipe], None] = lambda recipe: None,
) -> dict[str, Any]:
    """Train as whichever rank this process is: started by torchrun, or alone by plain python.

    Rank 0 shows the run in the terminal by reading its files, as `muster watch` does. `life` is
    what a rank does from joining the others to leaving them; `before` may refuse the recipe while
    there is no run directory yet.
    """
    place = cluster.detect(os.environ)
    set_up(f"Rank {place.rank}")
    if place.world == 1 and (words := idle_words(visible_gpus(), sys.argv)):
        log.warning("%s", words)
    _listen(place)
    try:
        loaded = load(recipe, cluster.own_arguments(overrides))
        before(loaded)
        settle(place, loaded.distributed.strategy)
        if place.rank > 0:
            return life(loaded, place, None)
        run = _own_run(loaded, place)
        with _watched(run), speaking_for(run, place):
            return life(loaded, place, run)
    except MusterError as error:
        log.error("%s", error)
        os._exit(2)  # other ranks may sit in a collective; torchrun ends them


def _listen(place: Place) -> None:
    """What asks for a stop at the next step. torchrun's SIGTERM is an order to leave at once."""
    stopping.listen(signal.SIGUSR1)
    if place.launcher != "torchrun":
        stopping.listen(signal.SIGTERM)


def _own_run(recipe: Recipe, place: Place) -> runs.Run:
    """A new run directory; after torchrun has started its ranks again, the one they had before."""
    parent = psutil.Process(os.getppid())
    root, agent = Path(recipe.logging.dir), [parent.pid, parent.create_time()]
    if place.restarts:
        for run in runs.every(root):
            if run.info().get("agent") == agent:
                return run
    run = runs.create(root, recipe.name, {"recipe.yaml": to_yaml(recipe)})
    run.update(agent=agent)
    return run


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
    logging.getLogger("muster.recipe.load").setLevel(logging.WARNING)  # older names are meant here

    return train_here(str(config), changes, before=lambda recipe: provide(recipe, folder))


def train_with_trainer(recipe: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The same with Hugging Face's own Trainer instead of muster's loop."""
    return train_here(recipe, overrides, _trainer_life)


def _trainer_life(recipe: Recipe, place: Place, run: runs.Run | None) -> dict[str, Any]:
    try:
        import_module("accelerate")  # transformers itself asks for it only later
        from muster import hf_trainer
    except ImportError as error:
        raise LaunchError(
            f"Hugging Face's Trainer needs transformers and accelerate ({error}); install them with "
            "pip install 'muster-train[trainer]'"
        ) from None
    if recipe.logging.profile:
        log.warning("logging.profile: Hugging Face's Trainer has its own loop, without a profile")
    return hf_trainer.run_rank(recipe, place, run)


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
    """What to say when one process runs `command` on a machine with several GPUs."""
    if gpus < 2:
        return None
    idle = f"{gpus - 1} others are idle" if gpus > 2 else "the other one is idle"
    return (
        f"only GPU 0 of {gpus} is in use, {idle}; to use all of them: "
        f"torchrun --nproc_per_node={gpus} {shlex.join(command)}"
    )


@contextmanager
def _watched(run: runs.Run) -> Iterator[None]:
    """Show a run that this very process is part of."""
    console, ended = Console(), threading.Event()

    def state() -> str:
        return "ended" if ended.is_set() else "running"

    watcher = threading.Thread(target=follow, args=(run.path, state, console), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join(5)
    if results := run.results():
        console.print(results_table(results, str(run.path)))
    if words := headline(run.path, str(run.path)):
        console.print(words, soft_wrap=True, markup=False)


def train_spawned(recipe: str, overrides: Sequence[str] = ()) -> None:
    """Train on every device of this machine, ranks started by torch.multiprocessing."""
    found = inventory.detect()
    wanted = load(recipe, overrides).distributed.devices
    ranks = wanted if isinstance(wanted, int) else len(found.gpus) or found.cpus
    spawn(train_here, (recipe, tuple(overrides)), ranks)
