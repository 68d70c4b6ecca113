"""Load balance of the ranks: time computing, waiting for others and waiting for data."""

from __future__ import annotations

from dataclasses import dataclass

RankTimes = tuple[float, float, float, float, int, int]
"""One rank's step: seconds computing, waiting for others, waiting for data, in all; cells filled, cells."""


@dataclass
class Balance:
    """Running sums over steps. The first step of a process is warm-up and does not count."""

    steps: int = 0
    ratio_sum: float = 0.0
    comm_wait: float = 0.0
    data_wait: float = 0.0
    total: float = 0.0
    filled: int = 0
    cells: int = 0

    def add(self, ranks: list[RankTimes]) -> None:
        """One step, with the times of each rank."""
        compute = [times[0] for times in ranks]
        mean = sum(compute) / len(compute)
        self.steps += 1
        self.ratio_sum += max(compute) / mean if mean > 0 else 1.0
        self.comm_wait += sum(times[1] for times in ranks)
        self.data_wait += sum(times[2] for times in ranks)
        self.total += sum(times[3] for times in ranks)
        self.filled += sum(times[4] for times in ranks)
        self.cells += sum(times[5] for times in ranks)

    def summary(self) -> dict[str, float]:
        """`slowest_over_mean` is 1 when all ranks compute equally long in every step."""
        if not self.steps:
            return {}
        return {
            "slowest_over_mean": self.ratio_sum / self.steps,
            "padding_share": 1 - self.filled / max(1, self.cells),
            "data_wait_share": self.data_wait / self.total,
            "comm_wait_share": self.comm_wait / self.total,
        }
