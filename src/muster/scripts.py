"""Training from a script: started by torchrun, by plain python, or spawning its own ranks."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from muster import runs
from muster.errors import MusterError
from muster.hardware import inventory
from muster.launch import cluster
from muster.launch.spawn import spawn
from muster.observe.console import follow, results_table
from muster.observe.logs import set_up
from muster.recipe.describe import to_yaml
from muster.recipe.load import load
from muster.worker import leave_word, run_rank

log = logging.getLogger(__name__)


def train_here(recipe: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Train as whichever rank this process is: started by torchrun, or alone by plain python.

    Rank 0 shows the run in the terminal by reading its files, as `muster watch` does.
    """
    place = cluster.detect(os.environ)
    set_up(f"Rank {place.rank}")
    try:
        loaded = load(recipe, overrides)
        if place.rank > 0:
            return run_rank(loaded, place)
        run = runs.create(Path(loaded.logging.dir), loaded.name, {"recipe.yaml": to_yaml(loaded)})
        run.own()
        run.update(state="running", ranks=place.world)
        with _watched(run):
            return run_rank(loaded, place, run)
    except MusterError as error:
        log.error("%s", error)
        os._exit(2)  # other ranks may sit in a collective; torchrun ends them


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
    except BaseException as error:
        leave_word(run.path, 0, error)
        run.update(state="failed", ended=time.time(), exit_code=1)
        raise
    finally:
        ended.set()
        watcher.join(5)
    if results := run.results():
        console.print(results_table(results, str(run.path)))


def train_spawned(recipe: str, overrides: Sequence[str] = ()) -> None:
    """Train on every device of this machine, ranks started by torch.multiprocessing."""
    found = inventory.detect()
    wanted = load(recipe, overrides).distributed.devices
    ranks = wanted if isinstance(wanted, int) else len(found.gpus) or found.cpus
    spawn(train_here, (recipe, tuple(overrides)), ranks)
