"""Addresses and ports: which are this machine's, which cannot work, which process uses a busy one."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import time

import psutil

from muster.errors import LaunchError
from muster.hardware import rehearsal
from muster.launch.cluster import Node

log = logging.getLogger(__name__)

POD_NAMES_S = 600.0  # until a pod has a machine, and its image is there
TOLD_S = 10.0


def check(node: Node) -> None:
    """Refuse addresses that cannot work, before a run directory exists."""
    if node.nodes > 1:
        refuse_loopback(node.address)
        if node.rank == 0:
            listen(node.address, node.port).close()
        elif resolve(node.address) in own_addresses() and not rehearsal.active():
            raise LaunchError(
                f"--master-addr {node.address} is an address of this machine, but --node-rank is {node.rank}; "
                "give the address of node 0"
            )


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens on `address` only; `port` 0 takes a free one."""
    family, where = _own_address(address, port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(where)
        listener.listen(4096)
    except OSError as error:
        listener.close()
        raise _cannot_listen(error, address, port) from None
    return listener


def refuse_loopback(address: str) -> None:
    """Other machines would connect to themselves instead of node 0, and time out. The nodes of a rehearsal
    may be one machine."""
    if not rehearsal.active() and ipaddress.ip_address(resolve(address)).is_loopback:
        raise LaunchError(
            f"--master-addr {address} is a loopback address; give an address of node 0 that the other "
            f"nodes can reach{_suggestion()}"
        )


def _suggestion() -> str:
    own = [a for a in own_addresses() if not ipaddress.ip_address(a).is_loopback]
    return f" (this machine has {', '.join(own[:4])})" if own else ""


def own_addresses() -> list[str]:
    """IPv4 and global IPv6 addresses of this machine."""
    found = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address
    ]
    return sorted(found, key=lambda address: (":" in address, address))


def resolve(address: str) -> str:
    """Its IP address. In Kubernetes a pod's name does not resolve before the pod has been up for a while."""
    begun, told = time.monotonic(), False
    end = begun + (POD_NAMES_S if "KUBERNETES_SERVICE_HOST" in os.environ else 0.0)
    while True:
        try:
            return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            problem = error
        if (now := time.monotonic()) < end:
            if not told and now > begun + TOLD_S:
                told = True
                log.warning("%s has no address yet; waiting for its pod to start", address)
            time.sleep(0.5)
            continue
        raise LaunchError(
            f"--master-addr {address} cannot be resolved on {os.uname().nodename} "
            f"({problem.strerror}); give an IP address, or fix /etc/hosts or DNS"
        ) from None


def _own_address(address: str, port: int) -> tuple[int, tuple[str, int]]:
    """The address of that name that belongs to this machine, and its family."""
    resolve(address)
    known = set(own_addresses())
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    mine = [entry for entry in found if entry[4][0] in known or str(entry[4][0]).startswith("127.")]
    family, *_, where = (mine or found)[0]
    return family, (str(where[0]), int(where[1]))


def _cannot_listen(error: OSError, address: str, port: int) -> LaunchError:
    if error.errno == errno.EADDRINUSE:
        holder = port_holder(port) or "a process that this user may not see"
        return LaunchError(
            f"port {port} on {address} is in use by {holder}; end it, or choose another with "
            "--master-port, the same on every machine"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return LaunchError(
            f"--master-addr {address} is not an address of this machine "
            f"({', '.join(own_addresses())}); start node 0 on the machine that has it"
        )
    return LaunchError(f"cannot listen on {address}:{port}: {error.strerror}")


def port_holder(port: int) -> str | None:
    """The process that listens on a TCP port: `python train.py (pid 4711, user alice)`."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return None
    for found in connections:
        if found.status != psutil.CONN_LISTEN or found.laddr.port != port or not found.pid:
            continue
        try:
            process = psutil.Process(found.pid)
            command = " ".join(process.cmdline()[:4]) or process.name()
            return f"{command} (pid {found.pid}, user {process.username()})"
        except psutil.Error:
            return f"pid {found.pid}"
    return None
