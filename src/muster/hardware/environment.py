"""Which variables this hardware wants, each with its reason. What the user set always wins."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass

from muster.hardware.inventory import Inventory

SHARP = ("H100", "H200", "B200")  # GPUs whose switches add gradients up on the way
NOT_FOR_NCCL = ("lo", "docker")  # interfaces, by the beginning of their names


@dataclass(frozen=True)
class Variable:
    name: str
    value: str
    reason: str
    set_by_user: bool


def variables(
    inventory: Inventory,
    ranks: int,
    strategy: str = "ddp",
    env: Mapping[str, str] = os.environ,
) -> list[Variable]:
    """What `ranks` ranks on this machine should find in their environment."""
    return [
        Variable(name, env.get(name, value), reason, name in env)
        for name, value, reason in _wanted(inventory, ranks, strategy)
    ]


def apply(found: list[Variable], env: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user did not. NCCL and CUDA read these once, so before either is used."""
    for variable in found:
        env.setdefault(variable.name, variable.value)


def data_workers(inventory: Inventory) -> int:
    """Decoding threads per rank: the cores' share of each GPU, one of them left to the rank itself.

    One where the model computes on the CPU too: decoding then takes time from it.
    """
    if not inventory.gpus:
        return 1
    return min(8, max(1, inventory.cpus // len(inventory.gpus) - 1))


def _wanted(inventory: Inventory, ranks: int, strategy: str) -> Iterator[tuple[str, str, str]]:
    share = max(1, inventory.cpus // ranks)
    yield "OMP_NUM_THREADS", str(share), f"{inventory.cpus} CPU cores for {ranks} rank(s)"
    if not inventory.gpus or ranks < 2:
        return  # NCCL is not used
    yield "NCCL_DEBUG", "INFO", "each rank's log says which transport NCCL chose"
    yield "NCCL_IB_DISABLE", "0", "InfiniBand may be used where there is any"
    if any(not name.startswith(NOT_FOR_NCCL) for name in inventory.interfaces):
        reason = "ranks meet through the network, not the loopback or docker's bridge"
        yield "NCCL_SOCKET_IFNAME", "^lo,docker", reason
    yield "NCCL_NET_GDR_LEVEL", "5", "network cards read GPU memory directly, at any distance"
    if inventory.links:
        pairs = len(inventory.gpus) * (len(inventory.gpus) - 1) // 2
        reason = "GPUs talk to each other over NVLink"
        if len(inventory.links) < pairs:
            reason += "; pairs without one go through host memory"
        yield "NCCL_P2P_LEVEL", "NVL", reason
    if inventory.nvswitch and all(any(s in g.name for s in SHARP) for g in inventory.gpus):
        yield "NCCL_NVLS_ENABLE", "1", "the switches add gradients up (NVLink SHARP)"
    if strategy == "ddp":
        reason = "kernels start in the order they were queued, so gradients leave early"
        yield "CUDA_DEVICE_MAX_CONNECTIONS", "1", reason


def left_out(inventory: Inventory, ranks: int, strategy: str = "ddp") -> dict[str, str]:
    """The variables people expect on such a machine and do not get, and why not."""
    if not inventory.gpus:
        return {"NCCL_*, CUDA_*": "there is no GPU: CPU ranks talk through gloo"}
    if ranks < 2:
        return {"NCCL_*": "one process has nobody to talk to"}
    reasons = {
        "NCCL_SOCKET_IFNAME": "the loopback is the only interface, and NCCL needs one",
        "NCCL_P2P_LEVEL": "no NVLink here; NVL would forbid PCIe too, so NCCL chooses",
        "NCCL_NVLS_ENABLE": "needs NVSwitch and Hopper or Blackwell; 1 fails elsewhere",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1 would keep sharded strategies from gathering while they compute",
    }
    wanted = {name for name, _, _ in _wanted(inventory, ranks, strategy)}
    return {name: reason for name, reason in reasons.items() if name not in wanted}
