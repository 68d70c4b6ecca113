"""Which cores a process may use, below a tree that stands in for /sys and /proc."""

import os

import pytest
from stand_ins import write

from muster.hardware import cpus, inventory

SYSTEM = "sys/devices/system"


@pytest.fixture
def affinity(monkeypatch):
    """A process that may run on CPUs 0 to 7."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def machine(root, **files):
    """Eight CPUs, four cores with two threads each, two NUMA nodes."""
    online = {f"{SYSTEM}/cpu/online": "0-7", f"{SYSTEM}/node/online": "0-1"}
    nodes = {f"{SYSTEM}/node/node0/cpulist": "0-1,4-5", f"{SYSTEM}/node/node1/cpulist": "2-3,6-7"}
    threads = {
        f"{SYSTEM}/cpu/cpu{c}/topology/thread_siblings_list": f"{c % 4},{c % 4 + 4}"
        for c in range(8)
    }
    return write(root, **online, **nodes, **threads, **files)


def test_nodes_and_hyperthreads(affinity, tmp_path):
    found = cpus.find(machine(tmp_path))
    assert found.nodes == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert found.cores == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found.usable == 8
    assert found.describe() == "8 CPU cores"


@pytest.mark.parametrize(
    ("files", "quota", "usable"),
    [
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None, 8),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "350000 100000"}, 3.5, 4),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "20000 100000"}, 0.2, 1),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "9900000 100000"}, 99.0, 8),
        (
            {
                "proc/self/cgroup": "0::/kube/pod/c1",
                "sys/fs/cgroup/kube/pod/c1/cpu.max": "600000 100000",
                "sys/fs/cgroup/kube/pod/cpu.max": "200000 100000",
                "sys/fs/cgroup/kube/cpu.max": "max 100000",
            },
            2.0,
            2,
        ),
        (
            {"proc/self/cgroup": "0::/outside/../x", "sys/fs/cgroup/cpu.max": "300000 100000"},
            3.0,
            3,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n3:cpuset:/",
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "250000",
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
            },
            2.5,
            3,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/docker/abc",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            4.0,
            4,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
            8,
        ),
    ],
)
def test_the_tightest_cgroup_quota_limits_the_cores(affinity, tmp_path, files, quota, usable):
    found = cpus.find(machine(tmp_path, **files))
    assert (found.quota, found.usable) == (quota, usable)


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpuset.cpus.effective": "2-3"},
        {"proc/self/cgroup": "3:cpuset:/j", "sys/fs/cgroup/cpuset/j/cpuset.effective_cpus": "2-3"},
    ],
)
def test_a_cpuset_limits_the_cores_and_is_shown(affinity, tmp_path, files):
    found = cpus.find(machine(tmp_path, **files))
    assert found.allowed == (2, 3)
    assert found.describe() == "2 CPU cores of 8 (affinity allows 2)"


def test_both_limits_are_shown(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}
    found = cpus.find(machine(tmp_path, **files))
    assert found.describe() == "2 CPU cores of 8 (affinity allows 4, cgroup quota 1.5)"


def test_the_inventory_counts_what_is_usable(affinity, tmp_path):
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "350000 100000"}
    assert inventory.detect(machine(tmp_path, **files)).cpus == 4


def test_a_tree_that_tells_nothing_leaves_the_affinity(affinity, tmp_path):
    found = cpus.find(tmp_path)
    assert (found.allowed, found.online) == (tuple(range(8)), tuple(range(8)))
    assert (found.nodes, found.quota) == ((), None)


def test_this_machine_has_every_allowed_cpu_in_one_core():
    found = inventory.detect().cpu
    assert set(found.allowed) == os.sched_getaffinity(0)
    listed = [cpu for core in found.cores for cpu in core]
    assert len(listed) == len(set(listed))
    assert set(found.allowed) <= set(listed)
    assert 1 <= found.usable <= len(found.allowed)


@pytest.mark.parametrize(
    ("given", "threads"), [("3", 3), ("4,2", 4), ("", None), ("0", None), ("many", None)]
)
def test_threads_that_the_user_asks_for_are_kept_and_said(affinity, monkeypatch, given, threads):
    from muster.cli.train import _devices

    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert cpus.asked_threads() == threads
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert cpus.asked_threads({"OMP_NUM_THREADS": given}) == threads
    found = inventory.Inventory((), 8, 1.0, "here")
    assert _devices(found, 2).startswith("2 CPU rank(s) × 4 thread(s)")
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert _devices(found, 2).startswith(f"2 CPU rank(s) × {threads or 4} thread(s)")
