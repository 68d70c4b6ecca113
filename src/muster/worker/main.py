"""From joining the other ranks to leaving them."""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

from muster import runs
from muster.errors import SHRINK, LaunchError
from muster.launch import cluster
from muster.launch.cluster import Place
from muster.launch.join import join
from muster.launch.rank import leave_word, settle, speaking_for
from muster.observe import heartbeat, stopping
from muster.observe.logs import log_to_file
from muster.parallel import mesh as meshes
from muster.parallel.mesh import Mesh
from muster.recipe.load import from_resolved
from muster.recipe.schema import Recipe
from muster.train import memory
from muster.train.loop import train
from muster.worker.prepare import look, prepare
from muster.worker.results import finish

log = logging.getLogger(__name__)


def run_rank(recipe: Recipe, place: Place, run: runs.Run | None = None) -> dict[str, Any]:
    """Train as one rank of `place.world` in the run directory that rank 0 names.

    Rank 0 gets the results, the others an empty dictionary.
    """
    task = look(recipe, place.world)
    mesh, run = meet(recipe, place, run)
    heartbeat.start(run.path, place.rank, recipe.distributed.stall_limit_s)
    log.info(
        "Distributed Training Initialized: Rank: %d/%d, Local Rank (GPU): %d",
        place.rank,
        place.world,
        place.local_rank,
    )
    try:
        job = prepare(recipe, mesh, run, task)
        results = finish(job, run, train(job))
    except BaseException as error:
        leave_word(run.path, place.rank, error)
        if not isinstance(error, memory.StartSmaller):
            heartbeat.failed(error)
        raise
    job.observer.close()
    meshes.leave()
    heartbeat.stop()
    return results


def meet(recipe: Recipe, place: Place, run: runs.Run | None) -> tuple[Mesh, runs.Run]:
    """Join the other ranks, side by side for now, in rank 0's run directory."""
    options = recipe.distributed
    if run is not None and place.rank == 0:
        heartbeat.clear(run.path)
    mesh = join(place, options.backend, options.timeout_s)
    path: list[Any] = [str(run.path.resolve()) if run else None]
    if mesh.world > 1:
        dist.broadcast_object_list(path)
    _check_shared(Path(path[0]), mesh)
    return mesh, runs.Run(Path(path[0]))


def _check_shared(folder: Path, mesh: Mesh) -> None:
    """A checkpoint's parts come from all nodes, so all of them must see the one run directory."""
    blind = [
        host
        for host, sees in mesh.gather((os.uname().nodename, (folder / "run.json").is_file()))
        if not sees
    ]
    if blind:
        raise LaunchError(
            f"rank 0's run directory {folder} does not exist on {', '.join(sorted(set(blind)))}; put "
            "logging.dir on storage that all nodes share"
        )


def main(folder: str) -> None:
    """A worker process's whole life. It leaves without tearing anything down: all that matters is
    on disk by then, other ranks may still sit in a collective, and destructors can wait for them."""
    run, place, code = runs.Run(Path(folder)), cluster.detect(os.environ), 0
    stopping.listen(signal.SIGTERM, signal.SIGUSR1)
    log_to_file(run.path, place.rank)
    try:
        recipe = from_resolved(run.path / "recipe.yaml")
        settle(place, recipe.distributed.strategy)
        with nullcontext() if place.agent else speaking_for(run, place):
            run_rank(recipe, place, run)
    except BaseException as error:
        leave_word(run.path, place.rank, error)
        code = SHRINK if isinstance(error, memory.StartSmaller) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
