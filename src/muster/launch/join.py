"""Initializes the process group of this rank, whichever launcher started it: torchrun, srun, mpirun,
deepspeed, muster itself; or none, with world size 1."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from muster.errors import MusterError
from muster.launch import cluster, rendezvous
from muster.launch.cluster import RankInfo
from muster.launch.process import set_up_process
from muster.parallel import mesh as meshes
from muster.parallel.layout import Layout
from muster.parallel.mesh import Backend, Mesh


def join(rank_info: RankInfo, backend: Backend, timeout_s: float) -> Mesh:
    """In a data-parallel layout of all ranks. The device is bound first, and two ranks on one GPU, or one
    that does not join within `timeout_s`, are refused by name before the first collective."""
    device, store = meshes.bind_device(rank_info.local_rank), None
    if rank_info.world > 1:
        store = rendezvous.for_rank(rank_info, timeout_s)
        rendezvous.register(store, rank_info, meshes.identity(device), timeout_s)
    layout = Layout(replicate=rank_info.world)
    rank, local_rank, local_world = rank_info.rank, rank_info.local_rank, rank_info.local_world
    return meshes.join(rank, local_rank, layout, backend, timeout_s, store, local_world)


@contextmanager
def joined(
    strategy: str = "ddp", backend: Backend = "auto", timeout_s: float = 300.0
) -> Iterator[Mesh]:
    """For a script: this rank on its own cores and device, in the default process group of
    `torch.distributed`. No wait takes longer than `timeout_s`. A MusterError ends the script with its
    message instead of a stack trace.

    A rank that fails does not destroy the process group: others may be in a collective, and its
    launcher ends them.
    """
    rank_info = cluster.detect(os.environ)
    try:
        set_up_process(rank_info, strategy)
        yield join(rank_info, backend, timeout_s)
    except MusterError as error:
        raise SystemExit(f"error: rank {rank_info.rank}: {error}") from None
    meshes.leave()


def is_rank() -> bool:
    """Whether a launcher started one process per rank, and this is one of them."""
    alone = cluster.detect(os.environ).launcher == "alone"
    return not alone and not cluster.slurm_launcher(os.environ)
