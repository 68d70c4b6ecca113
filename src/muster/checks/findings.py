"""What a check found out, and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "note", "warn", "fail"]

# One rule for whatever is too slow. All ranks wait for the slowest, so a rank (or its data) at 1/1.15
# of the others' speed costs 13 % of every device; at 1/1.5, a third.
SLOW, TOO_SLOW = 1.15, 1.5


@dataclass(frozen=True)
class Finding:
    """`figures` are measured numbers, for programs that read the JSON."""

    step: str
    status: Status
    words: str
    cause: str = ""
    cure: str = ""
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status in ("warn", "fail") and not (self.cause and self.cure):
            raise ValueError(f"a warning or failure needs a cause and a cure: {self.words}")


@dataclass(frozen=True)
class Report:
    findings: Sequence[Finding]
    world: int
    hosts: Sequence[str]
    seconds: float

    @property
    def fit(self) -> bool:
        return not any(f.status == "fail" for f in self.findings)

    @property
    def verdict(self) -> str:
        failed = list(dict.fromkeys(f.step for f in self.findings if f.status == "fail"))
        if failed:
            return f"not fit to train on: {', '.join(failed)}"
        warnings = sum(f.status == "warn" for f in self.findings)
        return "fit to train on" + (f", with {warnings} warning(s)" if warnings else "")

    def as_dict(self) -> dict[str, Any]:
        return {"fit": self.fit, "verdict": self.verdict, **asdict(self)}


class RankNames:
    """The registered ranks and their hosts."""

    def __init__(self, registered: Mapping[int, dict[str, Any]]) -> None:
        self.registered = dict(registered)
        names: dict[str, set[Any]] = {}
        for report in self.registered.values():
            names.setdefault(report["host"], set()).add(report["net"])
        self._shared_names = {name for name, nets in names.items() if len(nets) > 1}

    def host(self, rank: int) -> str:
        """Its name; where two machines have one name, with the address."""
        report = self.registered.get(rank)
        if report is None:
            return "an unknown host"
        shared = report["host"] in self._shared_names
        return f"{report['host']} ({report['address']})" if shared else str(report["host"])

    def name(self, rank: int) -> str:
        return f"rank {rank} on {self.host(rank)}"

    def names(self, ranks: Sequence[int]) -> str:
        more = f" and {len(ranks) - 6} more" if len(ranks) > 6 else ""
        return ", ".join(self.name(rank) for rank in ranks[:6]) + more

    def hosts(self) -> dict[str, list[int]]:
        """The ranks on each host, in order."""
        found: dict[str, list[int]] = {}
        for rank in sorted(self.registered):
            found.setdefault(self.host(rank), []).append(rank)
        return found

    def hosts_of(self, ranks: Sequence[int]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.host(rank) for rank in ranks))


def find_outliers(values: Mapping[int, Hashable]) -> tuple[Hashable, list[int]]:
    """The most common value (rank 0's in a tie), and the ranks that have another one."""
    counts = Counter(values[rank] for rank in sorted(values))
    usual = counts.most_common(1)[0][0]
    return usual, [rank for rank in sorted(values) if values[rank] != usual]
