"""A rank's process around its training: CPU affinity and environment, ownership of the run directory,
and error reports."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

import torch

from muster import run_directory
from muster.errors import MusterError
from muster.hardware import affinity, environment, inventory, network
from muster.hardware.cpus import asked_threads
from muster.launch import cluster, failure
from muster.launch.cluster import RankInfo
from muster.observe import storage
from muster.writing import write_json

log = logging.getLogger(__name__)


def set_up_process(rank_info: RankInfo, strategy: str) -> list[environment.Variable]:
    """Pin to cores near this rank's GPU, or to its own share of them; set the variables for the hardware,
    which are returned, and torch's own for libraries that read nothing else."""
    found = inventory.detect()
    local_world = rank_info.local_world
    nodes = -(-rank_info.world // local_world)  # of which the last may have fewer ranks
    bound, sharing = False, local_world
    if found.cpu and rank_info.launcher in ("srun", "mpirun"):  # they may bind each rank themselves
        bound, sharing = found.cpu.bound, found.cpu.ranks_sharing(local_world)
    atexit.register(leave_torchruns_folder)
    variables = environment.variables(
        found,
        local_world,
        strategy,
        nodes=nodes,
        master=rank_info.address,
        sharing=sharing,
        logged=False,
    )
    environment.apply(variables)
    cores = os.sched_getaffinity(0)
    if not bound:
        gpu = rank_info.local_rank if found.gpus else None
        cores = affinity.cores_for(rank_info.local_rank, local_world, found, gpu)
        affinity.pin(cores)
    torch.set_num_threads(asked_threads() or len(cores))
    if rank_info.world == 1:
        return variables
    cluster.export(rank_info, os.environ)
    if nodes == 1 and (interface := network.interface_for(rank_info.address)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return variables


@contextmanager
def run_ownership(
    run: run_directory.Run, claim: TextIOWrapper, world: int, attempt: str = ""
) -> Iterator[None]:
    """For rank 0 without a supervisor: it writes the run's state, heartbeat, failure and report."""
    from muster.page import report

    try:
        with claim:
            run.own()
            run.keep_alive()
            run.update(state="running", ranks=world, failure=None, exit_code=None)
            try:
                yield
            except BaseException as error:
                record_error(run.path, 0, error, attempt)
                time.sleep(1.0)  # the rank that failed first may still be writing its report
                found = failure.collect(run.path, {}, world, attempt=attempt)
                run.update(state="failed", failure=found, ended=time.time(), exit_code=1)
                raise
    finally:
        report.write_at_end(run)  # which may take longer than the next owner waits


def record_error(folder: Path, rank: int, error: BaseException, attempt: str = "") -> None:
    """Write this rank's error report, once; the supervisor of this attempt reads it."""
    if getattr(error, "recorded", False):
        return
    error.recorded = True  # type: ignore[attr-defined]
    expected, message = isinstance(error, MusterError), str(error)
    if isinstance(error, OSError) and (words := storage.problem_words(error, folder)):
        expected, message = True, words
    log.error("%s", message if expected else traceback.format_exc())
    document = {
        "rank": rank,
        "host": os.uname().nodename,
        "time": time.time(),
        "expected": expected,
        "kind": type(error).__name__,
        "message": message,
    }
    try:
        write_json(folder / "ranks" / failure.report_name(rank, attempt), document)
    except OSError as problem:
        log.error("the error report could not be written: %s", problem.strerror)


def exit_without_cleanup(code: int) -> NoReturn:
    """Without destroying the process group: a thread of this process, or another rank, may still be in a
    collective."""
    leave_torchruns_folder()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def leave_torchruns_folder() -> None:
    """torchrun makes a folder for its ranks and removes it never. The last rank to leave does, where nothing is
    in it: without --redirects, nobody writes anything there."""
    folder = cluster.torchruns_folder(os.environ)
    for place in (folder, *folder.parents[:3]) if folder else ():
        try:
            place.rmdir()
        except OSError:  # not empty
            return
