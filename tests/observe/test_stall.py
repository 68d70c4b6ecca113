"""When a rank counts as stalled, by what it and the others do: seconds are counted, not waited for."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from muster.observe.gather import Look
from muster.observe.stall import KNOWN, LEAST_S, Others, StallLimit, StallWatch

LONGEST_S = 540.0
STEP = "optimizer step"


class Clock:
    """A rank under watch, of which one tick passes a second."""

    def __init__(self, folder: Path, *, step_s: float = 0.1, adaptive: bool = True) -> None:
        self.folder, self.now = folder, 1000.0
        limit = StallLimit(LONGEST_S, adaptive=adaptive)
        for step in range(KNOWN + 1):
            limit.step_begins(step * step_s)
        self.watch = StallWatch(limit, Others(folder, 0))
        self.watch.stalled((STEP, 5, self.now), self.now)
        self.last = (STEP, 5, self.now)

    def other(self, phase: str, idle: float, limit_s: float, age: float = 0.0) -> None:
        now = time.time() - age
        state = {"time": now, "since": now - idle, "phase": phase, "limit_s": limit_s}
        (self.folder / "1.heartbeat.json").write_text(json.dumps(state))

    def seconds(self, phase: str = STEP, other: str | None = None, limit_s: float = 0.0) -> int:
        """Until it counts as stalled. `other`: the phase of a second rank that is alive."""
        self.last = (phase, 5, self.now)
        for passed in range(int(2 * LONGEST_S)):
            if other is not None:
                self.other(other, passed, limit_s)
            if self.watch.stalled(self.last, self.now + passed):
                return passed
        raise AssertionError("it never counted as stalled")


@pytest.fixture
def clock(tmp_path):
    return Clock(tmp_path)


def test_a_step_has_a_minute_and_other_phases_what_the_timeout_gives(clock):
    assert clock.seconds() == LEAST_S
    assert clock.seconds("saving") == LONGEST_S
    assert clock.seconds("evaluation") == LONGEST_S


def test_long_steps_have_twenty_times_the_median(tmp_path):
    assert Clock(tmp_path, step_s=10.0).seconds() == 200
    assert Clock(tmp_path, step_s=100.0).seconds() == LONGEST_S


def test_the_first_steps_have_the_time_to_compile():
    limit = StallLimit(LONGEST_S, adaptive=True)
    for step in range(KNOWN):
        limit.step_begins(float(step))
        assert limit.of(STEP) == LONGEST_S
    limit.step_begins(float(KNOWN))
    assert limit.of(STEP) == LEAST_S


def test_a_given_limit_holds_in_every_phase(tmp_path):
    limit = StallLimit(10.0)
    for step in range(9):
        limit.step_begins(float(step))
    assert limit.of(STEP) == limit.of("saving") == 10.0


def test_a_rank_within_its_own_limit_is_waited_for(clock):
    assert clock.seconds("counting the batch", other="waiting for data", limit_s=300) == 300
    assert clock.seconds(other="compiling", limit_s=LONGEST_S) == LONGEST_S
    assert clock.seconds(other=STEP, limit_s=LEAST_S) == LEAST_S


@pytest.mark.parametrize("phase", [STEP, "saving"])
def test_a_rank_without_a_heartbeat_ends_the_wait_after_a_minute_in_any_phase(clock, phase):
    clock.other("evaluation", 0.0, LONGEST_S, age=LEAST_S)
    assert clock.seconds(phase) == LEAST_S


def test_slow_storage_of_another_rank_is_waited_for_as_long_as_its_bytes_move(clock):
    clock.last = ("saving", 5, clock.now)
    for passed in range(int(3 * LONGEST_S)):
        clock.other("saving", idle=passed % 60, limit_s=LONGEST_S)
        assert not clock.watch.stalled(clock.last, clock.now + passed)
    assert clock.seconds(other="starting", limit_s=LONGEST_S) == LONGEST_S


def test_a_rank_that_has_ended_is_not_missed(clock):
    clock.other("ended", 0.0, LONGEST_S, age=LEAST_S)
    assert clock.seconds("saving") == LONGEST_S


def test_time_in_which_the_whole_job_was_suspended_does_not_count(clock):
    clock.last = (STEP, 5, clock.now)
    assert not clock.watch.stalled(clock.last, clock.now)
    assert not clock.watch.stalled(clock.last, clock.now + 3600)
    assert not clock.watch.stalled(clock.last, clock.now + 3610)


def test_nothing_stalls_before_the_collector_has_told_what_the_others_do(clock):
    told: list[Look | None] = [Look()]
    clock.watch = StallWatch(clock.watch.limit, Others(clock.folder, 0, lambda: told[0]))
    clock.watch.stalled(clock.last, clock.now)
    assert not any(clock.watch.stalled(clock.last, clock.now + passed) for passed in range(70))
    told[0] = None  # it does not answer at all: then the files are read
    assert clock.watch.stalled(clock.last, clock.now + 71)


@pytest.mark.parametrize("every_s", [1.0, 8.0])
def test_others_are_judged_alike_by_the_looks_of_their_collector(tmp_path, every_s):
    """It looks the more seldom the more nodes there are."""
    seen: list[Look] = [Look()]
    others = Others(tmp_path, 0, lambda: seen[0])
    now = time.time()

    def look(number: int, age: float) -> None:
        state = {"rank": 1, "time": now - age, "since": now - age, "phase": "saving"}
        seen[0] = Look(number, every_s, ({**state, "limit_s": LONGEST_S},))
        for _ in range(30):  # each is asked for once a second, and counts once
            others.look()

    others.look()
    assert not others.at_work(starting=False), "nothing is known yet"
    look(1, 100.0)
    assert others.at_work(starting=False)
    for number in range(2, 2 + int(-(-30 // every_s))):
        assert not others.silent(60.0)
        look(number, 100.0)
    assert others.silent(60.0)
    look(100, 0.0)
    assert others.at_work(starting=False)
    assert not others.silent(60.0)


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0], ids=["back", "forward"])
def test_a_clock_that_is_set_while_ranks_wait_names_nobody_who_beats_again(
    clock, monkeypatch, jump_s
):
    """The other rank's heartbeat stands still for 25 s, as on storage that blocks, and goes on."""
    real, shift = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + shift[0])
    clock.last = ("saving", 5, clock.now)
    for passed in range(200):
        if passed == 80:
            shift[0] = jump_s
        if not 75 <= passed < 100:
            clock.other("saving", idle=1.0, limit_s=LONGEST_S)
        assert not clock.watch.stalled(clock.last, clock.now + passed), passed


@pytest.mark.parametrize("jump_s", [-3600.0, 0.0, 3600.0], ids=["back", "never", "forward"])
def test_a_rank_that_is_gone_is_found_whatever_the_clocks_say(clock, monkeypatch, jump_s):
    """Of this machine, against the time of the other's last heartbeat."""
    real = time.time
    clock.other("saving", idle=1.0, limit_s=LONGEST_S)
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    assert LEAST_S <= clock.seconds("saving") <= 1.5 * LEAST_S + 2
