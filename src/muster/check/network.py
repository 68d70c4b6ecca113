"""Step 8: network interfaces, and whether the hosts know each other by name."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from typing import Any

from muster.check.findings import Finding, Roll
from muster.check.seat import Account, Seat
from muster.hardware.network import interface_for


def measure(seat: Seat) -> Account:
    """One rank of each host speaks for it: what every host's name means there."""
    if seat.place.local_rank:
        return {}
    here = (seat.board.read(f"here/{rank}") for rank in range(seat.place.world))
    hosts = {said["host"] for said in here if said}
    return {
        "interfaces": {i.name: list(i.addresses) for i in seat.inventory.network},
        "usable": [i.name for i in seat.inventory.network if i.left_out is None],
        "infiniband": [
            f"{p.device} {p.rate}{'' if p.active else ', down'}" for p in seat.inventory.infiniband
        ],
        "names": {name: resolve(name) for name in sorted(hosts | {"localhost"})},
        "master": [seat.place.address, resolve(seat.place.address)],
        "interface": interface_for(seat.place.address),
    }


def resolve(name: str) -> list[str]:
    """Its addresses; empty where nobody knows it."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]).split("%")[0] for entry in found))


def judge(accounts: Mapping[int, Account], roll: Roll) -> list[Finding]:
    speakers = {rank: said for rank, said in accounts.items() if said}
    several = len(roll.hosts()) > 1
    found: list[Finding] = []
    for rank, said in sorted(speakers.items()):
        found += _several(rank, said, roll) if several else _alone(rank, said, roll)
    if found:
        return found
    words = []
    for rank, said in sorted(speakers.items()):
        by = f" by {said['interface']}" if several and said["interface"] else ""
        cards = f", {'; '.join(said['infiniband'])}" if said["infiniband"] else ""
        shown = ", ".join(said["usable"]) or "the loopback only"
        words.append(f"{roll.host(rank)}: {shown}{cards}; {_meaning(*said['master'])}{by}")
    return [Finding("network", "ok", "\n".join(words))]


def _meaning(name: str, addresses: list[str]) -> str:
    return f"{name} resolves" + (f" to {', '.join(addresses)}" if addresses != [name] else "")


def _alone(rank: int, said: Account, roll: Roll) -> list[Finding]:
    addresses = said["names"]["localhost"]
    if addresses and all(ipaddress.ip_address(a).is_loopback for a in addresses):
        return []
    return [
        Finding(
            "network",
            "fail",
            f"{roll.host(rank)}: localhost means {', '.join(addresses) or 'nothing'}",
            cause="/etc/hosts lacks the line for the loopback, or a name server answers for it",
            cure="add `127.0.0.1 localhost` to /etc/hosts",
            ranks=(rank,),
            hosts=roll.hosts_of([rank]),
        )
    ]


def _several(rank: int, said: Account, roll: Roll) -> list[Finding]:
    here: dict[str, Any] = {"ranks": (rank,), "hosts": roll.hosts_of([rank])}
    host, found = roll.host(rank), []
    own = roll.arrived[rank]["host"]
    addresses = said["names"].get(own, [])
    if not addresses or all(ipaddress.ip_address(a).is_loopback for a in addresses):
        meaning = f"only {', '.join(addresses)}" if addresses else "nothing"
        found.append(
            Finding(
                "network",
                "warn",
                f"{host}: its own name {own} means {meaning} there",
                cause="/etc/hosts binds the name to the loopback, or nothing knows it; gloo would offer "
                "that address to the other hosts, and they would wait",
                cure=f"export GLOO_SOCKET_IFNAME={said['interface'] or 'INTERFACE'} on every host, or "
                "give the name its real address in /etc/hosts",
                **here,
            )
        )
    unknown = [n for n, where in said["names"].items() if not where and n not in (own, "localhost")]
    if unknown:
        found.append(
            Finding(
                "network",
                "warn",
                f"{host} cannot resolve {', '.join(unknown)}",
                cause="no name server knows these hosts, and /etc/hosts does not list them",
                cure="add them to /etc/hosts or DNS; or give addresses, not names, as --master-addr",
                **here,
            )
        )
    if not said["master"][1]:
        found.append(
            Finding(
                "network",
                "fail",
                f"{host} cannot resolve the meeting point {said['master'][0]}",
                cause="the name given as --master-addr is unknown there",
                cure="give its IP address, or add it to /etc/hosts or DNS",
                **here,
            )
        )
    return found
