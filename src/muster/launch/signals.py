"""What a signal asks a supervisor for: to stop the run, or that this machine leaves it.

A module of its own: `python -m muster.launch.local` is another module than the one that others import.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from muster.observe.results import STOP_FILE
from muster.run_directory import Run
from muster.writing import write

LEAVE = threading.Event()  # this machine is asked to leave its elastic run


def stop_on_signal(run: Run) -> None:
    """SIGTERM and SIGUSR1 ask the run to save and end, as `muster stop` does."""

    def request_stop(number: int, _: object) -> None:
        if not (run.path / STOP_FILE).exists():
            write(run.path / STOP_FILE, signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, request_stop)


def leave_on_signal(run: Run, leave: Callable[[], object] = LEAVE.set) -> None:
    """On a node that an elastic run can go on without: SIGTERM asks this machine alone to leave."""
    stop_on_signal(run)
    signal.signal(signal.SIGTERM, lambda *_: leave())
