"""Registered ranks, for tests of findings."""

from __future__ import annotations

from typing import Any

from muster.checks.findings import Finding, RankNames


def rank_names(*hosts: str, **changes: dict[int, Any]) -> RankNames:
    """`rank_names("a", "a", "b")` has ranks 0 and 1 on host a and rank 2 on b, numbered as they should be;
    `local_rank={1: 0}` changes what rank 1 says."""
    registered = {}
    for rank, host in enumerate(hosts):
        registered[rank] = {
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
        registered[rank] |= {name: of[rank] for name, of in changes.items() if rank in of}
    return RankNames(registered)


def only(findings: list[Finding], status: str) -> Finding:
    """The one finding there is, of this status."""
    assert [f.status for f in findings] == [status], findings
    return findings[0]
