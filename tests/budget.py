"""What the tests cost. After the ordinary set: seconds by folder, and a warning for whatever grew
past its limit. The limits hold for two idle cores; CONTRIBUTING.md says how a test stays cheap."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping

import pytest

TOTAL_S = 570.0  # by the clock; with the tests that run alone, ten minutes
SLOWEST_S = 20.0  # a test with its fixtures


def warnings(spent: Mapping[str, float], total: float) -> Iterator[str]:
    """One sentence for each limit that is passed, the slowest test first."""
    if total > TOTAL_S:
        yield f"the tests took {total:.0f} s, more than the {TOTAL_S:.0f} s they may take"
    for name, seconds in sorted(spent.items(), key=lambda pair: -pair[1]):
        if seconds > SLOWEST_S:
            yield f"{name} took {seconds:.0f} s, more than the {SLOWEST_S:.0f} s of any test"


def by_folder(spent: Mapping[str, float]) -> Counter[str]:
    """Seconds by the folder below tests/, or by the file where there is none."""
    found: Counter[str] = Counter()
    for name, seconds in spent.items():
        found["/".join(name.partition("::")[0].split("/")[:2])] += seconds
    return found


class Budget:
    """The plugin; with several workers, only their parent's counts."""

    def __init__(self) -> None:
        self.began, self.spent = time.monotonic(), Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.spent[report.nodeid] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = time.monotonic() - self.began
        terminalreporter.section("what the tests cost")
        for folder, seconds in by_folder(self.spent).most_common():
            terminalreporter.write_line(f"{seconds:7.1f} s  {folder}")
        words = f"{sum(self.spent.values()):7.1f} s  in all, {total:.0f} s by the clock"
        terminalreporter.write_line(words)
        for words in warnings(self.spent, total):
            terminalreporter.write_line(f"warning: {words}", yellow=True)
