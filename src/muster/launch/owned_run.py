"""A run as the supervisor that owns it sees it: when another start has taken it over, this one writes nothing more.

A machine that was cut off or frozen comes back after its run was taken for lost, and another node 0 goes on
with it. Which of them is the owner is in run.json: a token that each start draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from muster.errors import LaunchError
from muster.run_directory import Run


class ReplacedError(LaunchError):
    """Another start owns the run now."""


@dataclass(frozen=True)
class OwnedRun(Run):
    token: str

    @classmethod
    def take(cls, run: Run) -> OwnedRun:
        return cls(run.path, run.own())

    def check_owner(self) -> None:
        """Storage that cannot say leaves it the owner."""
        self._check_writer(self.info())

    def _check_writer(self, info: dict[str, Any]) -> None:
        if info.get("owner", self.token) != self.token:
            raise ReplacedError(
                f"{self.name} has been taken over by process {info.get('pid')} on {info.get('host')}, so this start "
                "ends and changes nothing in it; to take part there, run the command that was printed when "
                "node 0 was lost"
            )


def is_owner(run: Run) -> bool:
    try:
        run.check_owner()
    except ReplacedError:
        return False
    return True
