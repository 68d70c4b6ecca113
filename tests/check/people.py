"""Ranks that have signed in, for tests that judge."""

from __future__ import annotations

from typing import Any

from muster.check.findings import Finding, Roll


def roll(*hosts: str, **changes: dict[int, Any]) -> Roll:
    """`roll("a", "a", "b")` has ranks 0 and 1 on host a and rank 2 on b, numbered as they should be;
    `local_rank={1: 0}` changes what rank 1 says."""
    arrived = {}
    for rank, host in enumerate(hosts):
        arrived[rank] = {
            "rank": rank,
            "local_rank": hosts[:rank].count(host),
            "local_world": hosts.count(host),
            "launcher": "torchrun",
            "host": host,
            "pid": 100 + rank,
            "address": f"10.0.0.{sorted(set(hosts)).index(host)}",
            "net": host,
            "boot": host,
        }
        arrived[rank] |= {name: of[rank] for name, of in changes.items() if rank in of}
    return Roll(arrived)


def only(findings: list[Finding], status: str) -> Finding:
    """The one finding there is, of this status."""
    assert [f.status for f in findings] == [status], findings
    return findings[0]
