"""Which CPU cores this process may use, and their topology."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from muster.hardware.devices import read, read_int


def asked_threads(env: Mapping[str, str] = os.environ) -> int | None:
    """Of OMP_NUM_THREADS, whose first number is for the outermost level; None where the user set none."""
    first = env.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else None


@dataclass(frozen=True)
class Cpus:
    """CPU numbers are the kernel's; two of one physical core are hyperthreads."""

    allowed: tuple[int, ...]  # by affinity: taskset, SLURM's binding, a container's cpuset
    online: tuple[int, ...]
    quota: float | None = None  # cores' worth of time that the cgroup grants, e.g. 3.5
    cpuset: tuple[
        int, ...
    ] = ()  # of the cgroup: a container's or a job's, whatever each process got
    nodes: tuple[tuple[int, ...], ...] = ()  # each NUMA node's CPUs, by the node's number
    cores: tuple[tuple[int, ...], ...] = ()  # each physical core's CPUs

    @property
    def bound(self) -> bool:
        """Whether a launcher, or taskset, left this process fewer CPUs than its container or job has."""
        return len(self.allowed) < len(self.cpuset or self.online)

    @property
    def usable(self) -> int:
        """Threads that can run at once: more of them only wait for each other."""
        if self.quota is None:
            return len(self.allowed)
        return max(1, min(len(self.allowed), math.ceil(self.quota)))

    def ranks_sharing(self, local_world: int) -> int:
        """How many of this node's ranks share the CPUs of this process, if their launcher gave as many to
        each: 1 where it bound each rank to its own, all of them where it bound none."""
        share = len(self.allowed) / len(self.cpuset or self.online)
        return min(local_world, max(1, round(local_world * share)))

    def describe(self) -> str:
        """With the limits that hide cores: `4 CPU cores of 64 (affinity allows 8, cgroup quota 3.5)`."""
        limits = []
        if len(self.allowed) < len(self.online):
            limits.append(f"affinity allows {len(self.allowed)}")
        if self.quota is not None and self.quota < len(self.allowed):
            limits.append(f"cgroup quota {self.quota:g}")
        if not limits:
            return f"{self.usable} CPU cores"
        return f"{self.usable} CPU cores of {len(self.online)} ({', '.join(limits)})"


def find(root: Path) -> Cpus:
    """Affinity is this process's own; the rest is read below `root`."""
    folder = root / "sys/devices/system"
    affinity = os.sched_getaffinity(0)
    cpuset = _cpuset(root) or set()
    allowed = tuple(sorted(affinity & (cpuset or affinity)))
    online = tuple(cpu_list(read(folder / "cpu/online") or "")) or allowed
    return Cpus(
        allowed=allowed,
        online=online,
        quota=_quota(root),
        cpuset=tuple(sorted(cpuset)),
        nodes=_nodes(folder / "node"),
        cores=_cores(folder / "cpu", online),
    )


def cpu_list(text: str) -> list[int]:
    """The kernel's notation: `0-3,8` is 0, 1, 2, 3, 8."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _nodes(folder: Path) -> tuple[tuple[int, ...], ...]:
    numbers = cpu_list(read(folder / "online") or "")
    lists = {n: tuple(cpu_list(read(folder / f"node{n}/cpulist") or "")) for n in numbers}
    return tuple(lists.get(n, ()) for n in range(max(numbers, default=-1) + 1))


def _cores(folder: Path, online: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    siblings = set()
    for cpu in online:
        text = read(folder / f"cpu{cpu}/topology/thread_siblings_list")
        siblings.add(tuple(cpu_list(text or str(cpu))))
    return tuple(sorted(siblings))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's cgroup and those above it, for version 2 and version 1.

    A container often sees its own group as the root, whatever /proc says: the root is always included.
    """
    mount = root / "sys/fs/cgroup"
    for line in (read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base = mount
        elif controller in controllers.split(","):
            base = next((p for p in (mount / controllers, mount / controller) if p.is_dir()), mount)
        else:
            continue
        place = Path(path.lstrip("/"))
        yield from (base / part for part in (place, *place.parents))


def _quota(root: Path) -> float | None:
    """The tightest quota on the way up, in cores."""
    found = []
    for folder in _groups(root, "cpu"):
        limits = (read(folder / "cpu.max") or "max").split()  # version 2: `350000 100000`
        if limits[0] != "max" and len(limits) == 2:
            found.append(int(limits[0]) / int(limits[1]))
        quota = read_int(folder / "cpu.cfs_quota_us")  # version 1: -1 is none
        period = read_int(folder / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            found.append(quota / period)
    return min(found, default=None)


def _cpuset(root: Path) -> set[int] | None:
    """The affinity the kernel reports lies within it already; read for a tree other than `/`."""
    for folder in _groups(root, "cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):
            if text := read(folder / name):
                return set(cpu_list(text))
    return None
