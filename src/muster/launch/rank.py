"""The life of a rank's process around its training: where it settles, who speaks for the run, and its
last words."""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch

from muster import runs
from muster.errors import MusterError
from muster.hardware import affinity, environment, inventory, network
from muster.launch import cluster, failure
from muster.launch.cluster import Place
from muster.observe.results import write_json

log = logging.getLogger(__name__)


def settle(place: Place, strategy: str) -> None:
    """Near this rank's GPU, or on cores of its own, with the variables that the hardware wants and
    torch's own, for libraries that read nothing else."""
    found = inventory.detect()
    nodes = place.world // place.local_world
    environment.apply(
        environment.variables(found, place.local_world, strategy, nodes=nodes, master=place.address)
    )
    cores = os.sched_getaffinity(0)
    bound = place.launcher in ("srun", "mpirun") and len(cores) < (os.cpu_count() or 1)
    if not bound:  # by them already, each rank to its own
        gpu = place.local_rank if found.gpus else None
        cores = affinity.cores_for(place.local_rank, place.local_world, found, gpu)
        affinity.pin(cores)
    threads = os.environ["OMP_NUM_THREADS"]
    torch.set_num_threads(int(threads) if threads.isdecimal() and int(threads) else len(cores))
    if place.world == 1:
        return
    cluster.export(place, os.environ)
    if nodes == 1 and (interface := network.interface_for(place.address)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


@contextmanager
def speaking_for(run: runs.Run, place: Place) -> Iterator[None]:
    """Without a supervisor, rank 0 answers for the run: that it lives, and how it failed."""
    if place.rank > 0:
        yield
        return
    claim = run.claim()
    run.own()
    run.keep_alive()
    run.update(state="running", ranks=place.world, failure=None, exit_code=None)
    try:
        yield
    except BaseException as error:
        leave_word(run.path, 0, error)
        time.sleep(1.0)  # the rank that failed first may still be writing why
        found = failure.collect(run.path, {}, place.world)
        run.update(state="failed", failure=found, ended=time.time(), exit_code=1)
        raise
    finally:
        claim.close()


def leave_word(folder: Path, rank: int, error: BaseException) -> None:
    """This rank's own account of its end, told once, for the supervisor to pass on."""
    if getattr(error, "told", False):
        return
    error.told = True  # type: ignore[attr-defined]
    expected, message = isinstance(error, MusterError), str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        expected, message = True, f"the disk that holds {folder} is full; free some space and go on"
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
        write_json(folder / "ranks" / f"{rank}.error.json", document)
    except OSError:
        log.error("and the disk has no room for these words either")


def leave(code: int) -> NoReturn:
    """Without tearing anything down: a thread of this process, or another rank, may still sit in a
    collective."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
