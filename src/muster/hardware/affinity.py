"""CPU affinity: each rank on its own cores, on the NUMA node of its GPU, or an equal share of all cores.

Two ranks that share cores slow each other down, and a rank on another NUMA node than its GPU copies
across the link between processors.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence

from muster.hardware.inventory import Inventory


def cores_for(
    local_rank: int, local_world: int, inventory: Inventory, gpu_index: int | None = None
) -> set[int]:
    """The CPUs, by the kernel's numbers, for one of this node's ranks.

    Only CPUs that this process may use already: an affinity set with taskset or by a scheduler is kept.
    Where this process sees every rank's GPU, and each names a NUMA node with cores enough, the ranks
    of a node share that node; otherwise all ranks share all cores. With fewer CPUs than ranks, each
    rank gets all of them.
    """
    if inventory.cpu is None:
        return set()
    allowed = set(inventory.cpu.allowed)
    if gpu_index is not None and max(local_world, gpu_index + 1) <= len(inventory.gpus):
        used = inventory.gpus[: max(local_world, gpu_index + 1)]
        homes = [gpu.numa for gpu in used]
        near = {node: allowed & _cpus_of(inventory, node) for node in homes if node is not None}
        if None not in homes and all(len(near[n]) >= homes.count(n) for n in near):
            home = homes[gpu_index]
            peers = [index for index, node in enumerate(homes) if node == home]
            mine = near[home] if home is not None else allowed
            return _share(inventory, mine, peers.index(gpu_index), len(peers))
    return _share(inventory, allowed, local_rank, local_world)


def pin(cores: Collection[int]) -> bool:
    """Move this process, with threads it already has, to `cores`; False where that is not allowed."""
    try:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it just ended
                os.sched_setaffinity(int(thread), cores)
    except OSError:
        return False
    return True


def _cpus_of(inventory: Inventory, node: int) -> set[int]:
    nodes = inventory.cpu.nodes if inventory.cpu else ()
    return set(nodes[node]) if node < len(nodes) else set()


def _share(inventory: Inventory, cpus: set[int], place: int, places: int) -> set[int]:
    """The slice at `place` of `places`; hyperthreads of one core stay together while they can."""
    cores = [set(core) & cpus for core in inventory.cpu.cores] if inventory.cpu else []
    known: set[int] = set().union(*cores)
    units: Sequence[set[int]] = [core for core in cores if core] + [{c} for c in cpus - known]
    if len(units) < places:
        units = [{cpu} for cpu in sorted(cpus)]
    if len(units) < places:
        return cpus
    mine = units[place * len(units) // places : (place + 1) * len(units) // places]
    return set().union(*mine)
