"""Step 9: network interfaces, and whether the hosts resolve each other's names."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from typing import Any

from muster.checks.context import RankContext, RankReport
from muster.checks.findings import Finding, RankNames
from muster.hardware.network import interface_for


def measure(context: RankContext) -> RankReport:
    """Local rank 0 reports for its host: what every host's name resolves to there."""
    if context.rank_info.local_rank:
        return {}
    here = (context.messages.read(f"registered/{rank}") for rank in range(context.rank_info.world))
    hosts = {report["host"] for report in here if report}
    return {
        "interfaces": {i.name: list(i.addresses) for i in context.inventory.network},
        "usable": [i.name for i in context.inventory.network if i.left_out is None],
        "infiniband": [
            f"{p.device} {p.rate}{'' if p.active else ', down'}"
            for p in context.inventory.infiniband
        ],
        "names": {name: resolve(name) for name in sorted(hosts | {"localhost"})},
        "master": [context.rank_info.address, resolve(context.rank_info.address)],
        "interface": interface_for(context.rank_info.address),
    }


def resolve(name: str) -> list[str]:
    """Its addresses; empty where it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]).split("%")[0] for entry in found))


def judge(reports: Mapping[int, RankReport], rank_names: RankNames) -> list[Finding]:
    answers = {rank: report for rank, report in reports.items() if report}
    several = len(rank_names.hosts()) > 1
    found: list[Finding] = []
    for rank, report in sorted(answers.items()):
        found += _several(rank, report, rank_names) if several else _alone(rank, report, rank_names)
    if found:
        return found
    message = []
    for rank, report in sorted(answers.items()):
        by = f" by {report['interface']}" if several and report["interface"] else ""
        cards = f", {'; '.join(report['infiniband'])}" if report["infiniband"] else ""
        shown = ", ".join(report["usable"]) or "the loopback only"
        message.append(
            f"{rank_names.host(rank)}: {shown}{cards}; {_meaning(*report['master'])}{by}"
        )
    return [Finding("network", "ok", "\n".join(message))]


def _meaning(name: str, addresses: list[str]) -> str:
    return f"{name} resolves" + (f" to {', '.join(addresses)}" if addresses != [name] else "")


def _alone(rank: int, report: RankReport, rank_names: RankNames) -> list[Finding]:
    addresses = report["names"]["localhost"]
    if addresses and all(ipaddress.ip_address(a).is_loopback for a in addresses):
        return []
    return [
        Finding(
            "network",
            "fail",
            f"{rank_names.host(rank)}: localhost resolves to {', '.join(addresses) or 'nothing'}",
            cause="/etc/hosts lacks the line for the loopback, or a name server resolves it",
            cure="add `127.0.0.1 localhost` to /etc/hosts",
            ranks=(rank,),
            hosts=rank_names.hosts_of([rank]),
        )
    ]


def _several(rank: int, report: RankReport, rank_names: RankNames) -> list[Finding]:
    here: dict[str, Any] = {"ranks": (rank,), "hosts": rank_names.hosts_of([rank])}
    host, found = rank_names.host(rank), []
    own = rank_names.registered[rank]["host"]
    addresses = report["names"].get(own, [])
    if not addresses or all(ipaddress.ip_address(a).is_loopback for a in addresses):
        meaning = f"only {', '.join(addresses)}" if addresses else "nothing"
        found.append(
            Finding(
                "network",
                "warn",
                f"{host}: its own name {own} resolves to {meaning} there",
                cause="/etc/hosts maps the name to the loopback, or nothing resolves it; gloo would give "
                "that address to the other hosts, which then time out",
                cure=f"export GLOO_SOCKET_IFNAME={report['interface'] or 'INTERFACE'} on every host, or "
                "give the name its real address in /etc/hosts",
                **here,
            )
        )
    unknown = [
        n for n, where in report["names"].items() if not where and n not in (own, "localhost")
    ]
    if unknown:
        found.append(
            Finding(
                "network",
                "warn",
                f"{host} cannot resolve {', '.join(unknown)}",
                cause="neither DNS nor /etc/hosts has these hosts",
                cure="add them to /etc/hosts or DNS; or give addresses, not names, as --master-addr",
                **here,
            )
        )
    if not report["master"][1]:
        found.append(
            Finding(
                "network",
                "fail",
                f"{host} cannot resolve the master address {report['master'][0]}",
                cause="the name given as --master-addr (MASTER_ADDR) is unknown there",
                cure="give its IP address, or add it to /etc/hosts or DNS",
                **here,
            )
        )
    return found
