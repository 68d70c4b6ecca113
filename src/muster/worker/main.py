"""One rank, from joining the process group to leaving it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from muster import run_directory
from muster.errors import AGAIN, LaunchError, StartAgain
from muster.hardware import meter
from muster.launch import cluster
from muster.launch.cluster import RankInfo
from muster.launch.join import join
from muster.launch.orphans import supervised
from muster.launch.process import (
    exit_without_cleanup,
    record_error,
    run_ownership,
    set_up_process,
)
from muster.observe import gather, heartbeat, stopping
from muster.observe.logs import log_to_file
from muster.parallel import mesh as meshes
from muster.parallel.device_test import verify_device
from muster.parallel.mesh import Mesh
from muster.recipe.batch import settle_as
from muster.recipe.load import from_resolved
from muster.recipe.own_task import comparable
from muster.recipe.schema import Recipe
from muster.training.job import Job
from muster.training.loop import train
from muster.worker.prepare import open_task, prepare
from muster.worker.results import finish
from muster.writing import keep_to

log = logging.getLogger(__name__)

TrainRank = Callable[[Recipe, RankInfo, run_directory.Run | None], dict[str, Any]]


def run_rank(
    recipe: Recipe, rank_info: RankInfo, run: run_directory.Run | None = None
) -> dict[str, Any]:
    """Train as one rank of `rank_info.world` in the run directory of rank 0.

    Rank 0 gets the results, the others an empty dictionary.
    """
    task = open_task(recipe)
    mesh, run, recipe = connect_ranks(recipe, rank_info, run)
    options = recipe.distributed
    adaptive = options.stall_s == "auto"
    collector, address = heartbeat_collector(mesh, run.path, rank_info.attempt)
    limit_s = options.stall_limit_s
    heartbeat.start(
        run.path,
        mesh.rank,
        limit_s,
        adaptive=adaptive,
        collector=address,
        attempt=rank_info.attempt,
    )
    log.info(
        "Distributed Training Initialized: Rank: %d/%d, Local Rank (GPU): %d",
        rank_info.rank,
        rank_info.world,
        rank_info.local_rank,
    )
    device = measure_device(mesh.device)
    heartbeat.measure(device.latest)
    job: Job | None = None
    try:
        verify_device(mesh)
        job = prepare(recipe, mesh, run, task)
        results = finish(job, run, train(job))
    except BaseException as error:
        record_error(run.path, rank_info.rank, error, rank_info.attempt)
        again = isinstance(error, StartAgain)
        if not again:
            heartbeat.failed(error)
        if job is not None:
            job.observer.keep_lines()
            job.observer.end_trackers("restarts" if again else "failed")
        raise
    finally:
        device.stop()
    job.observer.close()
    meshes.leave()
    heartbeat.stop()
    if collector:
        collector.close()
    return results


def heartbeat_collector(
    mesh: Mesh, folder: Path, attempt: str
) -> tuple[gather.Collector | None, str | None]:
    """Where this rank's heartbeats go: to its supervisor, else to the first rank of its node, which gets the
    collector."""
    if gather.ADDRESS in os.environ:
        return None, os.environ[gather.ADDRESS] or None
    own = None
    if mesh.local_rank == 0 and mesh.local_world > 1:
        own = gather.open_collector(folder, str(mesh.rank // mesh.local_world), attempt)
    host = os.uname().nodename
    told = mesh.gather((host, own.address if own else None))
    return own, next((address for name, address in told if name == host and address), None)


def measure_device(device: torch.device) -> meter.Meter:
    if device.type != "cuda":
        return meter.of_process()
    facts: Any = torch.cuda.get_device_properties(device)
    parts = [getattr(facts, f"pci_{name}_id", 0) for name in ("domain", "bus", "device")]
    place = "{:04x}:{:02x}:{:02x}.0".format(*parts)
    vendor = "amd" if torch.version.hip else "nvidia"
    visible = torch.cuda.device_count()
    return meter.of_gpu(
        meter.DeviceId(str(getattr(facts, "uuid", "")), place, facts.name, visible, vendor)
    )


def connect_ranks(
    recipe: Recipe, rank_info: RankInfo, run: run_directory.Run | None
) -> tuple[Mesh, run_directory.Run, Recipe]:
    """Join the process group, data-parallel for now, and open rank 0's run directory. The recipe comes
    back with the global batch of rank 0, which alone knows the run's first start."""
    options = recipe.distributed
    if run is not None and rank_info.rank == 0:
        heartbeat.clear(run.path)
    mesh = join(rank_info, options.backend, options.timeout_s)
    told: list[Any] = [str(run.path.resolve()) if run else None, recipe.training]
    if mesh.world > 1:
        dist.broadcast_object_list(told)
    path, first = Path(told[0]), told[1]
    recipe = settle_as(recipe, first)
    _check_agreement(recipe, path, mesh)
    keep_to(path)
    return mesh, run_directory.Run(path), recipe


def _check_agreement(recipe: Recipe, folder: Path, mesh: Mesh) -> None:
    """All nodes write parts of a checkpoint, so all of them must see the same run directory; and all ranks
    must train the same recipe."""
    same = json.dumps(comparable(recipe.as_dict()), sort_keys=True)
    digest = hashlib.sha256(same.encode()).hexdigest()
    sees = (folder / "run.json").is_file()
    found = mesh.gather((os.uname().nodename, sees, digest))
    if blind := sorted({host for host, sees, _ in found if not sees}):
        raise LaunchError(
            f"rank 0's run directory {folder} does not exist on {', '.join(blind)}; put logging.dir on "
            "storage that all nodes share"
        )
    if other := [rank for rank, (_, _, theirs) in enumerate(found) if theirs != found[0][2]]:
        raise LaunchError(
            f"rank {other[0]} has another recipe than rank 0; give every rank the same recipe, the "
            "same key=value words and the same file of its task"
        )


def run_process(
    recipe: Recipe,
    rank_info: RankInfo,
    run: run_directory.Run | None,
    claim: TextIOWrapper | None = None,
    train_rank: TrainRank = run_rank,
) -> dict[str, Any]:
    """What every rank's process does, whichever launcher started it: torchrun, srun, mpirun, deepspeed,
    torch.multiprocessing, a supervisor of muster's, or a user by plain python.

    Rank 0 has the run directory and, where there is no supervisor, the `claim` on it.
    """
    variables = set_up_process(rank_info, recipe.distributed.strategy)
    if run and claim:  # else a supervisor did, which knows what the user set
        run.update(environment=[vars(variable) for variable in variables])
    owned = (
        run_ownership(run, claim, rank_info.world, rank_info.attempt)
        if run and claim
        else nullcontext()
    )
    with owned:
        return train_rank(recipe, rank_info, run)


def listen_for_stop(rank_info: RankInfo) -> None:
    """Signals that ask for a checkpoint at the next step. torchrun's SIGTERM is none of them: torchrun
    kills its ranks seconds later."""
    stopping.listen(signal.SIGUSR1)
    if rank_info.launcher != "torchrun" or supervised():
        stopping.listen(signal.SIGTERM)


def main(folder: str) -> None:
    """`python -m muster.worker RUN`. It exits without cleanup: all results are on disk by then,
    other ranks may still be in a collective, and destructors can wait for them."""
    run, rank_info, code = run_directory.Run(Path(folder)), cluster.detect(os.environ), 0
    keep_to(run.path)
    listen_for_stop(rank_info)
    try:
        claim = None if supervised() or rank_info.rank > 0 else run.claim()
    except LaunchError as error:  # another process owns the run: nothing is written into it
        sys.exit(f"error: {error}")
    log_to_file(run.path, rank_info.rank)
    try:
        recipe = from_resolved(run.path / "recipe.yaml")
        run_process(recipe, rank_info, run, claim)
    except BaseException as error:
        record_error(run.path, rank_info.rank, error, rank_info.attempt)
        code = AGAIN if isinstance(error, StartAgain) else 1
    exit_without_cleanup(code)
