"""Environment variables for this hardware, each with its reason. What the user set always wins."""

from __future__ import annotations

import importlib.metadata
import math
import os
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import NamedTuple

from muster.hardware import network, rehearsal
from muster.hardware.inventory import Inventory

SHARP = (
    "H100",
    "H200",
    "B200",
    "B300",
    "GB200",
)  # GPUs with NVLink SHARP: reductions in the switches
SINCE = {  # NCCL's own documentation, "Environment Variables"
    "NCCL_P2P_LEVEL": (2, 3, 4),
    "NCCL_NET_GDR_LEVEL": (2, 4, 0),
    "NCCL_SOCKET_NTHREADS": (2, 4, 8),
    "NCCL_NSOCKS_PERTHREAD": (2, 4, 8),
    "NCCL_NVLS_ENABLE": (2, 17, 0),
}
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@dataclass(frozen=True)
class Variable:
    name: str
    value: str
    reason: str
    set_by_user: bool


class Rule(NamedTuple):
    """A variable that is common on such a machine; without a value it is left out for the reason."""

    name: str
    value: str | None
    reason: str


@dataclass(frozen=True)
class Job:
    """What the rules look at."""

    inventory: Inventory
    ranks: int  # on this node
    strategy: str
    nodes: int
    master: str | None
    env: Mapping[str, str]
    sharing: int  # ranks on the CPUs of the inventory
    logged: bool = True  # each rank writes to a file of its own

    @property
    def alone(self) -> bool:
        return self.ranks * self.nodes < 2

    @property
    def rehearsal(self) -> bool:
        return bool(self.inventory.gpus) and rehearsal.active(self.env)

    def of(self, vendor: str) -> bool:
        return any(gpu.vendor == vendor for gpu in self.inventory.gpus)


def variables(
    inventory: Inventory,
    ranks: int,
    strategy: str = "ddp",
    env: Mapping[str, str] = os.environ,
    nodes: int = 1,
    master: str | None = None,
    sharing: int | None = None,
    logged: bool = True,
) -> list[Variable]:
    """The environment of `ranks` ranks on each of `nodes` nodes.

    `master` is MASTER_ADDR: its route decides the network interface. `sharing` ranks share the CPUs of
    the inventory, by default all; 1 in a process that its launcher has bound to CPUs of its own.
    `logged`: each rank writes to a file of its own, not to a console that ranks share.
    """
    job = Job(inventory, ranks, strategy, nodes, master, env, sharing or ranks, logged)
    found = []
    for name, value, reason in _rules(job):
        if value is not None:
            found.append(Variable(name, env.get(name, value), reason, name in env))
        elif name in env:
            found.append(Variable(name, env[name], f"left out otherwise: {reason}", True))
    return found


def left_out(
    inventory: Inventory,
    ranks: int,
    strategy: str = "ddp",
    env: Mapping[str, str] = os.environ,
    nodes: int = 1,
    master: str | None = None,
) -> dict[str, str]:
    """The variables that are common on such a machine and are not set, and why."""
    job = Job(inventory, ranks, strategy, nodes, master, env, ranks)
    rules = [rule for rule in _rules(job) if rule.value is None and rule.name not in env]
    return {name: reason for name, _, reason in rules}


def apply(found: list[Variable], env: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user did not. NCCL and CUDA read these once, so before either is used."""
    for variable in found:
        env.setdefault(variable.name, variable.value)


def data_workers(cores: int, quota: float | None, ranks: int, gpu: bool) -> int:
    """Decoding threads of one of this node's `ranks` ranks, on `cores` CPUs of its own: one of them is left
    to the rank itself. `quota`, of the cgroup, is for all ranks together.

    Without a GPU there is one thread: decoding competes with the model for the CPU.
    """
    if not gpu:
        return 1
    if quota is not None:
        cores = min(cores, math.ceil(quota) // ranks)
    return min(8, max(1, cores - 1))


def nccl_version() -> tuple[int, ...] | None:
    """Of the NCCL that came with torch, from its package; None where unknown."""
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            parts = importlib.metadata.version(package).split(".")[:3]
        except importlib.metadata.PackageNotFoundError:
            continue
        return tuple(int(part) for part in parts if part.isdigit())
    return None


def _rules(job: Job) -> Iterator[Rule]:
    """The rules for the machine, less what its NCCL does not have."""
    version = nccl_version()
    for rule in _profiles(job):
        since = SINCE.get(rule.name)
        if rule.value is not None and version and since and version < since:
            known, found = (".".join(map(str, v)) for v in (since, version))
            reason = f"NCCL has it from {known} on, and this is {found}"
            yield rule._replace(value=None, reason=reason)
        else:
            yield rule


def _profiles(job: Job) -> Iterator[Rule]:
    cpus, sharing = job.inventory.cpus, job.sharing
    threads = str(max(1, cpus // sharing))
    yield Rule("OMP_NUM_THREADS", threads, f"{cpus} CPU cores for {sharing} rank(s)")
    if job.inventory.gpus:
        yield from _allocator(job)
    if job.of("amd"):
        yield from _rocm()
    if job.alone:
        if job.inventory.gpus:
            yield Rule("NCCL_*", None, "one process has no peers")
    else:
        reason = "collectives in each rank's flight recorder, to find the rank that caused a hang"
        yield Rule("TORCH_FR_BUFFER_SIZE", "2000", reason)
        if job.inventory.gpus:
            yield from _collectives(job)
        if job.rehearsal:
            yield from _rehearsal(job)
        elif job.nodes > 1:
            yield from _cluster(job)
        elif job.inventory.gpus:
            yield from _one_node(job)
    if not job.inventory.gpus:
        yield Rule("NCCL_*, CUDA_*", None, "there is no GPU: CPU ranks use gloo")


def _allocator(job: Job) -> Iterator[Rule]:
    """One setting under three names; the user's name is kept, since two that differ would clash."""
    name = next((name for name in ALLOCATOR if name in job.env), ALLOCATOR[0])
    yield Rule(name, "expandable_segments:True", "less memory lost to fragmentation")
    names = {gpu.name for gpu in job.inventory.gpus}
    if len(names) > 1 and job.of("nvidia"):
        reason = "GPUs differ: numbered as nvidia-smi numbers them, not the fastest first"
        yield Rule("CUDA_DEVICE_ORDER", "PCI_BUS_ID", reason)


def _rocm() -> Iterator[Rule]:
    reason = "kernels keep their scratch memory instead of allocating it at each launch"
    yield Rule("HSA_NO_SCRATCH_RECLAIM", "1", reason)
    yield Rule("HSA_ENABLE_SDMA", "1", "copies run on DMA engines, in parallel to the computation")
    reason = "GPUs without XGMI between them may write to each other over PCIe"
    yield Rule("HSA_FORCE_FINE_GRAIN_PCIE", "1", reason)


def _collectives(job: Job) -> Iterator[Rule]:
    """Between the GPUs of one node."""
    found = job.inventory
    if job.logged:
        yield Rule("NCCL_DEBUG", "INFO", "each rank's log says which transport NCCL chose")
    else:
        yield Rule("NCCL_DEBUG", "WARN", "ranks may share a console: only NCCL's warnings")
    if job.of("amd"):
        return  # RCCL finds XGMI by itself; NVLink, its switches and CUDA's queues are NVIDIA's
    if not job.rehearsal:
        yield from _nvlink(found)
    if job.strategy == "ddp":
        reason = "kernels start in the order they were queued, so that gradients are sent early"
        yield Rule("CUDA_DEVICE_MAX_CONNECTIONS", "1", reason)
    else:
        reason = "1 would keep sharded strategies from overlapping all-gathers with computation"
        if job.strategy == "auto":
            reason = (
                "CUDA reads it before strategy auto is resolved, and 1 would slow a sharded one; "
                "strategy ddp, by name, sets 1"
            )
        yield Rule("CUDA_DEVICE_MAX_CONNECTIONS", None, reason)


def _nvlink(found: Inventory) -> Iterator[Rule]:
    if found.links:
        reason = "GPUs are connected by NVLink"
        if len(found.links) < len(found.gpus) * (len(found.gpus) - 1) // 2:
            reason += "; pairs without one go through host memory"
        yield Rule("NCCL_P2P_LEVEL", "NVL", reason)
    else:
        reason = "no NVLink here; NVL would forbid PCIe too, so NCCL chooses"
        yield Rule("NCCL_P2P_LEVEL", None, reason)
    if found.nvswitch and all(any(s in g.name for s in SHARP) for g in found.gpus):
        yield Rule("NCCL_NVLS_ENABLE", "1", "the switches reduce gradients (NVLink SHARP)")
    else:
        reason = "needs NVSwitch and Hopper or Blackwell; 1 fails elsewhere"
        yield Rule("NCCL_NVLS_ENABLE", None, reason)


def _rehearsal(job: Job) -> Iterator[Rule]:
    """Ranks of one machine that NCCL takes for as many hosts."""
    name = (network.interface_for(job.master) if job.master else None) or "lo"
    reason = "a rehearsal: all ranks are on this machine"
    yield Rule("NCCL_SOCKET_IFNAME", f"={name}", reason)
    yield Rule("GLOO_SOCKET_IFNAME", name, reason)
    yield Rule("NCCL_IB_DISABLE", "1", f"{reason}, and sockets are enough")


def _one_node(job: Job) -> Iterator[Rule]:
    yield Rule("NCCL_IB_DISABLE", "0", "InfiniBand may be used where there is any")
    reason = "network cards read GPU memory directly, at any distance (SYS)"
    yield Rule("NCCL_NET_GDR_LEVEL", "5", reason)
    if any(not network.why_not(name) for name in job.inventory.interfaces):
        reason = "ranks connect through the network, not the loopback or docker's bridge"
        yield Rule("NCCL_SOCKET_IFNAME", "^lo,docker", reason)
    else:
        reason = "the loopback is the only interface, and NCCL needs one"
        yield Rule("NCCL_SOCKET_IFNAME", None, reason)


def _cluster(job: Job) -> Iterator[Rule]:
    """Between nodes: through which interface, and over InfiniBand or sockets."""
    name = network.interface_for(job.master) if job.master else None
    if job.master is None:
        reason = "no master address is given, so the route is unknown"
    elif name is None:
        reason = f"no route leads from here to {job.master}"
    elif name == "lo":
        name, reason = None, f"{job.master} is the loopback: other nodes cannot reach it"
    else:
        reason = f"the interface that leads to {job.master}"
    yield Rule("GLOO_SOCKET_IFNAME", name, reason)
    if not job.inventory.gpus:
        return
    yield Rule("NCCL_SOCKET_IFNAME", name and f"={name}", reason)  # =: that very name, not a prefix
    cards = [port.device for port in job.inventory.infiniband if port.active]
    if cards:
        yield Rule("NCCL_IB_DISABLE", "0", f"InfiniBand or RoCE is up: {', '.join(cards)}")
        reason = "network cards read GPU memory directly, through PCIe switches but no CPU (PXB)"
        yield Rule("NCCL_NET_GDR_LEVEL", "2", reason)
        return
    yield Rule("NCCL_IB_DISABLE", "1", "no InfiniBand or RoCE port is up here")
    yield Rule("NCCL_NET_GDR_LEVEL", None, "needs InfiniBand or RoCE, and no such port is up")
    yield Rule("NCCL_SOCKET_NTHREADS", "4", "one thread cannot fill a fast network")
    yield Rule("NCCL_NSOCKS_PERTHREAD", "2", "nor can one connection of each thread")
    yield Rule("NCCL_BUFFSIZE", "4194304", "4 MiB a channel, whatever the site's own file says")
