"""One process becomes a rank among others, whoever started them: torchrun, srun, mpirun, deepspeed,
muster itself, or nobody, and then it is alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from muster.errors import MusterError
from muster.launch import cluster, rendezvous
from muster.launch.cluster import Place
from muster.launch.rank import settle
from muster.parallel import mesh as meshes
from muster.parallel.layout import Layout
from muster.parallel.mesh import Backend, Mesh


def join(place: Place, backend: Backend, timeout_s: float) -> Mesh:
    """Side by side with all other ranks. The device is bound first, and two ranks on one GPU, or one
    that does not come within `timeout_s`, are refused by name before anything is sent."""
    device, store = meshes.bind_device(place.local_rank), None
    if place.world > 1:
        store = rendezvous.for_rank(place, timeout_s)
        rendezvous.sign_in(store, place, meshes.identity(device), timeout_s)
    layout = Layout(replicate=place.world)
    return meshes.join(place.rank, place.local_rank, layout, backend, timeout_s, store)


@contextmanager
def joined(
    strategy: str = "ddp", backend: Backend = "auto", timeout_s: float = 300.0
) -> Iterator[Mesh]:
    """For a script: this rank on cores and a device of its own, in a process group that is there for
    `torch.distributed` too. No wait takes longer than `timeout_s`. What muster refuses ends the
    script with its sentence instead of a stack trace.

    A rank that fails says no goodbye: others may sit in a collective, and its launcher ends them.
    """
    place = cluster.detect(os.environ)
    try:
        settle(place, strategy)
        yield join(place, backend, timeout_s)
    except MusterError as error:
        raise SystemExit(f"error: rank {place.rank}: {error}") from None
    meshes.leave()


def is_rank() -> bool:
    """Whether a launcher started one process per rank, and this is one of them."""
    alone = cluster.detect(os.environ).launcher == "alone"
    return not alone and not cluster.slurm_launcher(os.environ)
