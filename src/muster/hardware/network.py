"""The network interfaces between nodes, and the InfiniBand devices."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from muster.hardware.devices import numa_node, read

# By prefix of the name: virtual interfaces of containers and virtual machines, with no route to other hosts.
VIRTUAL = {
    "docker": "docker's bridge",
    "br-": "a bridge of docker's",
    "veth": "a container's virtual link",
    "virbr": "a bridge for virtual machines",
    "cni": "a bridge for pods",
    "flannel": "an overlay for pods",
    "cali": "a pod's virtual link",
    "cilium": "a pod's virtual link",
    "lxc": "a container's virtual link",
    "kube": "for Kubernetes services",
    "nodelocaldns": "for DNS in Kubernetes",
    "tun": "a tunnel",
    "tap": "a virtual machine's virtual link",
}


@dataclass(frozen=True)
class Interface:
    name: str
    addresses: tuple[str, ...]  # IPv4 first
    speed_mbps: int | None = None
    left_out: str | None = None  # why ranks should not use it


@dataclass(frozen=True)
class InfinibandPort:
    device: str  # mlx5_0
    port: int
    active: bool
    rate: str  # 400 Gb/sec (4X NDR)
    link_layer: str  # InfiniBand, or Ethernet for RoCE
    numa: int | None = None


def interfaces(root: Path) -> tuple[Interface, ...]:
    """Every interface that is up, those fit for ranks first."""
    states, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
    found = []
    for name, state in sorted(states.items()):
        if not state.isup:
            continue
        mine = [(a.family, a.address.split("%")[0]) for a in addresses.get(name, ())]
        known = [(f, a) for f, a in mine if f in (socket.AF_INET, socket.AF_INET6)]
        usable = tuple(a for f, a in sorted(known, key=lambda pair: pair[0]))
        why = why_not(name) or _no_route(usable)
        if why is None and (root / "sys/class/net" / name / "bridge").is_dir():
            why = "a bridge within this machine"
        found.append(Interface(name, usable, state.speed or None, why))
    return tuple(sorted(found, key=lambda interface: interface.left_out is not None))


def why_not(name: str) -> str | None:
    """Why an interface of that name is not for ranks; None where the name says nothing."""
    if name == "lo":
        return "the loopback: other hosts cannot reach it"
    return next((why for start, why in VIRTUAL.items() if name.startswith(start)), None)


def _no_route(addresses: tuple[str, ...]) -> str | None:
    if all(ipaddress.ip_address(a).is_link_local for a in addresses):
        return "it has no address that others can reach"
    return None


def interface_for(address: str) -> str | None:
    """The interface through which this host reaches `address` (a name or a number).

    The kernel picks it: a datagram socket that is connected sends nothing, and knows its own address.
    None where the name does not resolve or no route leads there.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            mine = str(probe.getsockname()[0]).split("%")[0]
    except OSError:
        return None
    for name, known in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == mine for entry in known):
            return name
    return "lo" if ipaddress.ip_address(mine).is_loopback else None


def infiniband(root: Path) -> tuple[InfinibandPort, ...]:
    """Ports of the InfiniBand and RoCE cards, from /sys/class/infiniband."""
    found = []
    for state in sorted((root / "sys/class/infiniband").glob("*/ports/*/state")):
        port, device = state.parent, state.parent.parent.parent
        found.append(
            InfinibandPort(
                device=device.name,
                port=int(port.name),
                active=(read(state) or "").startswith("4:"),
                rate=read(port / "rate") or "?",
                link_layer=read(port / "link_layer") or "?",
                numa=numa_node(device / "device"),
            )
        )
    return tuple(found)
