"""Interfaces and InfiniBand ports; the kernel's lists are stood in for, its routes are real."""

import ipaddress
import socket
from types import SimpleNamespace

import psutil
import pytest
from stand_ins import write

from muster.hardware import network
from muster.hardware.network import InfinibandPort

HOST = {
    "lo": "127.0.0.1",
    "eth0": "10.0.0.7",
    "ib0": "10.1.0.7",
    "docker0": "172.17.0.1",
    "br-3f2a": "172.18.0.1",
    "veth9ab1": "fe80::1",
    "mybridge": "10.9.0.1",
    "eth1": "fe80::2",
    "eth2": None,
    "down0": "10.2.0.7",
}


@pytest.fixture
def host(monkeypatch):
    """A host of many interfaces; all but `down0` are up."""

    def address(words):
        family = socket.AF_INET6 if ":" in words else socket.AF_INET
        return [
            SimpleNamespace(family=psutil.AF_LINK, address="02:42:ac:11:00:02"),
            SimpleNamespace(family=family, address=words),
        ]

    addresses = {name: address(words) if words else [] for name, words in HOST.items()}
    states = {name: SimpleNamespace(isup=name != "down0", speed=25000) for name in HOST}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)


def test_interfaces_that_lead_nowhere_are_left_out_with_the_reason(host, tmp_path):
    found = network.interfaces(write(tmp_path, **{"sys/class/net/mybridge/bridge/stp_state": 0}))
    usable = [interface for interface in found if not interface.left_out]
    assert [(i.name, i.addresses, i.speed_mbps) for i in usable] == [
        ("eth0", ("10.0.0.7",), 25000),
        ("ib0", ("10.1.0.7",), 25000),
    ]
    assert list(found[:2]) == usable
    reasons = {interface.name: interface.left_out for interface in found[2:]}
    assert set(reasons) == set(HOST) - {"eth0", "ib0", "down0"}
    assert "loopback" in reasons["lo"]
    assert "docker" in reasons["docker0"]
    assert "docker" in reasons["br-3f2a"]
    assert "container" in reasons["veth9ab1"]
    assert "bridge" in reasons["mybridge"]
    assert "no address" in reasons["eth1"]
    assert "no address" in reasons["eth2"]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.9", "localhost"])
def test_the_loopback_is_recognised(address):
    assert network.interface_for(address) == "lo"


def test_a_hosts_own_address_names_its_interface():
    """Packets to it stay on the loopback; the name that matters is the one other hosts reach."""
    for name, known in psutil.net_if_addrs().items():
        for entry in known:
            if entry.family == socket.AF_INET and psutil.net_if_stats()[name].isup:
                assert network.interface_for(entry.address) == name


def test_a_far_address_leaves_by_an_interface_that_is_up():
    name = network.interface_for("198.51.100.1")
    if name is None:
        pytest.skip("this machine has no route to other networks")
    assert psutil.net_if_stats()[name].isup
    addresses = [entry.address for entry in psutil.net_if_addrs()[name]]
    assert any(not ipaddress.ip_address(a).is_loopback for a in addresses if a.count(".") == 3)


def test_a_name_nobody_knows_has_no_interface():
    assert network.interface_for("nobody.invalid") is None


def test_infiniband_and_roce_ports(tmp_path):
    root = "sys/class/infiniband"
    write(
        tmp_path,
        **{
            f"{root}/mlx5_0/ports/1/state": "4: ACTIVE",
            f"{root}/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
            f"{root}/mlx5_0/ports/1/link_layer": "InfiniBand",
            f"{root}/mlx5_0/device/numa_node": 1,
            f"{root}/mlx5_1/ports/1/state": "1: DOWN",
            f"{root}/mlx5_1/ports/1/rate": "10 Gb/sec (1X QDR)",
            f"{root}/mlx5_1/ports/1/link_layer": "Ethernet",
        },
    )
    assert network.infiniband(tmp_path) == (
        InfinibandPort("mlx5_0", 1, True, "400 Gb/sec (4X NDR)", "InfiniBand", 1),
        InfinibandPort("mlx5_1", 1, False, "10 Gb/sec (1X QDR)", "Ethernet", None),
    )
    assert network.infiniband(tmp_path / "none") == ()
