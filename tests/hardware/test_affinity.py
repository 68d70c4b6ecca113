"""Which cores a rank gets: machines are written down, pinning is done for real."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from muster.hardware.affinity import cores_for, pin
from muster.hardware.inventory import Cpus, Gpu, Inventory


def machine(cpus: Cpus, homes: tuple[int | None, ...] = ()) -> Inventory:
    """GPU i hangs on NUMA node homes[i]."""
    gpus = tuple(Gpu(i, "GPU", 80.0, f"GPU-{i}", numa=node) for i, node in enumerate(homes))
    return Inventory(gpus, cpus.usable, 64.0, "host", cpu=cpus)


def processor(allowed=range(16)) -> Cpus:
    """Two nodes of four cores with two threads each: CPUs 0-3 and 8-11 are node 0's."""
    nodes = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)
    cores = tuple((c, c + 8) for c in range(8))
    return Cpus(tuple(allowed), tuple(range(16)), nodes=nodes, cores=cores)


def slices(found: Inventory, ranks: int, gpus: bool) -> list[set[int]]:
    return [cores_for(r, ranks, found, r if gpus else None) for r in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_cpu_ranks_share_all_cores_without_sharing_one(ranks):
    found = slices(machine(processor()), ranks, gpus=False)
    assert sorted(c for cores in found for c in cores) == list(range(16)), "each core once"
    sizes = [len(cores) for cores in found]
    assert max(sizes) - min(sizes) <= 2, "even to within one core of two threads"
    for cores in found:
        assert cores == {c % 8 for c in cores} | {c % 8 + 8 for c in cores}, "threads together"


def test_slices_are_contiguous():
    assert slices(machine(processor()), 2, gpus=False)[0] == {0, 1, 2, 3, 8, 9, 10, 11}


def test_more_ranks_than_cores_split_the_threads_and_then_share_everything():
    found = slices(machine(processor()), 16, gpus=False)
    assert [len(cores) for cores in found] == [1] * 16
    assert len(set.union(*found)) == 16
    assert slices(machine(processor()), 17, gpus=False) == [set(range(16))] * 17


def test_ranks_lie_near_their_gpus():
    found = slices(machine(processor(), (1, 0, 0, 1)), 4, gpus=True)
    assert found == [{4, 5, 12, 13}, {0, 1, 8, 9}, {2, 3, 10, 11}, {6, 7, 14, 15}]


def test_gpus_without_a_rank_take_no_share():
    found = slices(machine(processor(), (0, 0, 0, 1)), 2, gpus=True)
    assert found == [{0, 1, 8, 9}, {2, 3, 10, 11}]


def test_a_rank_on_a_later_gpu_gets_cores_near_it():
    assert cores_for(0, 1, machine(processor(), (0, 1)), gpu_index=1) == {
        4,
        5,
        6,
        7,
        12,
        13,
        14,
        15,
    }


@pytest.mark.parametrize(
    ("allowed", "ranks", "sharing"),
    [
        (range(4), 4, 1),  # srun or mpirun bound each rank to four CPUs of sixteen
        (range(8), 4, 2),  # mpirun --bind-to package: two ranks on each of two
        (range(16), 4, 4),  # bound to nothing
        (range(1), 4, 1),
        (range(16), 1, 1),
    ],
)
def test_a_bound_rank_shares_its_cpus_with_those_bound_alike(allowed, ranks, sharing):
    cpus = processor(allowed)
    assert cpus.ranks_sharing(ranks) == sharing
    assert cpus.bound == (len(cpus.allowed) < 16)


def test_ranks_of_a_job_with_few_cpus_of_a_machine_are_not_bound():
    """The job's cgroup has four CPUs of sixteen, and all four ranks may use them."""
    cpus = replace(processor(range(4)), cpuset=(0, 1, 2, 3))
    assert (cpus.bound, cpus.ranks_sharing(4)) == (False, 4)


def test_a_choice_made_outside_holds():
    """taskset or a scheduler left four CPUs, all of node 0."""
    found = machine(processor(allowed=(0, 1, 8, 9)), (0, 0))
    assert slices(found, 2, gpus=True) == [{0, 8}, {1, 9}]
    assert slices(found, 2, gpus=False) == [{0, 8}, {1, 9}]


@pytest.mark.parametrize(
    ("allowed", "homes"),
    [
        ((0, 1, 2, 3), (0, 0, 1, 1)),
        (range(16), (0, 1, None, 1)),
        (range(16), (0, 1, 7, 1)),
        (range(16), (1,)),  # a mask for each rank shows it no other's GPU
    ],
)
def test_where_a_node_is_unknown_or_forbidden_all_ranks_share_all_cores(allowed, homes):
    found = slices(machine(processor(allowed), homes), 4, gpus=True)
    assert sorted(c for cores in found for c in cores) == sorted(allowed)
    assert len({len(cores) for cores in found}) == 1


def test_pinning_moves_the_process_and_the_threads_it_has():
    code = """
import os, threading
from muster.hardware.affinity import pin
ready, stop = threading.Event(), threading.Event()
tids = []
def work():
    tids.append(threading.get_native_id()); ready.set(); stop.wait()
threading.Thread(target=work).start(); ready.wait()
core = max(os.sched_getaffinity(0))
assert pin({core})
assert os.sched_getaffinity(0) == os.sched_getaffinity(tids[0]) == {core}
stop.set()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pinning_to_a_core_that_does_not_exist_says_so_and_changes_nothing():
    before = os.sched_getaffinity(0)
    assert not pin({4095})
    assert os.sched_getaffinity(0) == before
