"""What a setting that may be `auto` came to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AutoChoice:
    """Whether something is used, and why. `optional`: neither the recipe nor the layout decides. A later start
    of the run then does the same, and the run goes on without what fails."""

    used: bool
    reason: str
    optional: bool = True

    @classmethod
    def forced(cls, used: bool, reason: str = "the recipe says so") -> AutoChoice:
        return cls(used, reason, optional=False)

    def __str__(self) -> str:
        return f"{'yes' if self.used else 'no'}: {self.reason}"
