"""Half of a recording is made in a forked process, and here where that fails."""

from __future__ import annotations

import os
import signal

from muster.planner.profile import ExecutionMode, ProfileRecorder
from muster.planner.second_process import SecondProcess
from plan.subjects import GPT, planner, subject


def test_a_recording_by_two_processes_is_that_of_one(monkeypatch):
    mode = ExecutionMode("bf16")
    alone = ProfileRecorder(subject(*GPT), mode).profile()
    two = planner(subject(*GPT))
    two.second = SecondProcess(two.traces_for_more)
    two.second.usable = True  # on one core too
    here = []
    real = ProfileRecorder.record
    monkeypatch.setattr(
        ProfileRecorder, "record", lambda *given: here.append(given[2]) or real(*given)
    )
    assert two._record(mode, True) == alone
    assert set(here) == {2}, "the rest was recorded in the other process"


def test_what_the_second_process_cannot_do_is_left_to_the_first():
    def fails(kind: str) -> int:
        if kind == "raises":
            raise RuntimeError("on purpose")
        if kind == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    for kind in ("raises", "is killed"):
        second = SecondProcess(fails)
        second.usable = True
        assert second.call("works")() not in (None, os.getpid())
        assert second.call(kind)() is None
        assert not second.usable
        assert second.call("works")() is None
