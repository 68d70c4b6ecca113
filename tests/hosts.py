"""Hosts on one machine: network namespaces with addresses and host names of their own."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import ascii_lowercase

import pytest

import processes

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="network namespaces need root and iproute2",
)


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    namespace: str
    device: str

    def start(
        self, *command: str | Path, folder: Path, real: bool = False, **env: str
    ) -> subprocess.Popen[str]:
        """The command on this host, in a process group of its own."""
        return processes.start(
            command,
            folder,
            real=real,
            preexec_fn=partial(_move_to, self.namespace, self.name),
            start_new_session=True,
            env=env,
        )

    def muster(self, *arguments: str, folder: Path, **env: str) -> subprocess.Popen[str]:
        return self.start(*processes.MUSTER, *arguments, folder=folder, **env)

    def add_address(self, address: str) -> None:
        _ip("-n", self.namespace, "addr", "add", address, "dev", self.device)

    def cut(self) -> None:
        """Pull the cable: packets are lost without a word to either side."""
        _ip("-n", self.namespace, "link", "set", self.device, "down")

    def mend(self) -> None:
        """Plug the cable in again."""
        _ip("-n", self.namespace, "link", "set", self.device, "up")


def _move_to(namespace: str, name: str) -> None:
    """This process, to the network of that namespace and under that host name."""
    CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
    kernel = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as network:
        if kernel.setns(network.fileno(), CLONE_NEWNET) or kernel.unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    socket.sethostname(name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def network(count: int) -> Iterator[tuple[Host, ...]]:
    """`count` hosts on one switch, which is a bridge in a namespace of its own."""
    number = os.getpid() % 50000
    switch = f"muster-{number}-switch"
    made = tuple(
        Host(f"host-{letter}", f"10.77.0.{i}", f"muster-{number}-{letter}", f"mu{number}{letter}")
        for i, letter in enumerate(ascii_lowercase[:count], start=1)
    )
    try:
        for name in (switch, *(host.namespace for host in made)):
            _ip("netns", "add", name)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host in made:
            _plug_in(host, switch)
        yield made
    finally:
        for host in made:
            found = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True)
            for pid in found.stdout.split():
                subprocess.run(["kill", "-9", pid], capture_output=True)
        for name in (*(host.namespace for host in made), switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _plug_in(host: Host, switch: str) -> None:
    port = f"port-{host.name[-1]}"
    _ip("link", "add", host.device, "netns", host.namespace, "type", "veth", "peer", "name", port, "netns", switch)  # fmt: skip
    _ip("-n", switch, "link", "set", port, "master", "bridge")
    _ip("-n", switch, "link", "set", port, "up")
    _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.device)
    _ip("-n", host.namespace, "link", "set", "lo", "up")
    _ip("-n", host.namespace, "link", "set", host.device, "up")


@pytest.fixture
def hosts() -> Iterator[tuple[Host, ...]]:
    with network(2) as pair:
        yield pair
