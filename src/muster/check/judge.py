"""The one who asks: gives out the steps, waits for the ranks' accounts, and draws conclusions.

It computes nothing itself, so a rank that hangs or dies cannot take it along.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from muster.check.board import POLL_S, PULSE_S, Board
from muster.check.findings import Finding, Report, Roll
from muster.check.seat import Account, Options, Step
from muster.check.steps import STEPS
from muster.diagnose.known import match

LAST_WORDS_S = 2.0  # for ranks to read that the check has ended
DEATH_SHOWS_S = 0.2  # a rank's peers may complain that it left before its process is seen to end


class EndedFromOutsideError(Exception):
    """A signal asks this process to go. What is known so far is still told."""


class Judge:
    def __init__(
        self,
        board: Board,
        world: int,
        options: Options,
        exits: Callable[[], dict[int, str]] = dict,
    ) -> None:
        """`exits`: the ranks whose processes have ended, each with how, where someone can see them."""
        self.board, self.world, self.options, self.exits = board, world, options, exits
        self.findings: list[Finding] = []
        self.roll = Roll({})
        self.orders = 0
        self.broken = False  # a rank raised an error, so the group of all ranks may be gone
        self.waiting = "ranks"

    def conduct(self) -> Report:
        started = time.monotonic()
        try:
            self._conduct()
        except EndedFromOutsideError:
            missing = [rank for rank in range(self.world) if self._account(rank) is None]
            self.findings.append(self._ended(missing))
        report = Report(self.findings, self.world, list(self.roll.hosts()), 0.0)
        self._order({"step": None, "fit": report.fit})
        self._dismiss()
        return Report(report.findings, self.world, report.hosts, time.monotonic() - started)

    def _conduct(self) -> None:
        self.board.post("options", asdict(self.options))
        if not self._roll_call():
            return
        steps = [step for step in STEPS if step.name != "data" or self.options.recipe]
        while steps:
            step = steps.pop(0)
            found = self._try(step)
            self.findings += found
            if self.broken or (step.ends and any(f.status == "fail" for f in found)):
                # Ranks that cannot join may not know each other's hosts: still worth asking.
                steps = [s for s in steps if s.name == "network" and self.broken]
                self._not_tried(step, steps)
            if self.exits() or any(self._account(rank) is None for rank in range(self.world)):
                return  # a rank is gone

    def _roll_call(self) -> bool:
        def arrived() -> dict[int, Any]:
            said = {rank: self.board.read(f"here/{rank}") for rank in range(self.world)}
            return {rank: words for rank, words in said.items() if words is not None}

        end = time.monotonic() + self.options.timeout_s
        while len(here := arrived()) < self.world and time.monotonic() < end:
            if self.exits():
                break
            time.sleep(POLL_S)
        self.roll = Roll(here)
        missing = [rank for rank in range(self.world) if rank not in here]
        if missing:
            self.findings.append(self._never_arrived(missing))
        return not missing

    def _try(self, step: Step) -> list[Finding]:
        limit = self._limit(step)
        self._order({"step": step.name, "limit_s": limit})
        self.waiting = step.name
        said, late = self._collect(limit + 5.0)  # ranks notice first when they wait for each other
        errors = {rank: account["error"] for rank, account in said.items() if "error" in account}
        if errors:
            time.sleep(DEATH_SHOWS_S)
        if late or self.exits():
            return [self._lost(step, late)]
        if errors:
            self.broken = True
            return [self._broke(step, errors)]
        return step.judge(said, self.roll)

    def _limit(self, step: Step) -> float:
        return max(step.limit_s, self.options.timeout_s)

    def _collect(self, limit_s: float) -> tuple[dict[int, Account], list[int]]:
        """Every rank's account, and the ranks that gave none."""
        end, said = time.monotonic() + limit_s, dict[int, Account]()
        while len(said) < self.world and time.monotonic() < end:
            for rank in set(range(self.world)) - set(said):
                if (account := self._account(rank)) is not None:
                    said[rank] = account
            if self.exits():  # even one that gave its account: the others will only complain
                break
            time.sleep(POLL_S)
        return said, sorted(set(range(self.world)) - set(said))

    def _account(self, rank: int) -> Account | None:
        account: Account | None = self.board.read(f"account/{self.orders - 1}/{rank}")
        return account

    def _order(self, order: dict[str, Any]) -> None:
        self.board.post(f"order/{self.orders}", order)
        self.orders += 1

    def _dismiss(self) -> None:
        """Whoever holds the store waits until the ranks have read that it is over."""
        end = time.monotonic() + LAST_WORDS_S
        for rank in self.roll.arrived:
            while self.board.read(f"bye/{rank}") is None and time.monotonic() < end:
                if rank in self.exits():
                    break
                time.sleep(POLL_S)

    def _never_arrived(self, missing: list[int]) -> Finding:
        gone = self.exits()
        here = self.roll.names(sorted(self.roll.arrived)) or "nobody"
        if gone:
            words = "; ".join(f"rank {rank} {how}" for rank, how in list(gone.items())[:4])
            words = f"{words}, before all had arrived; present: {here}"
        else:
            words = (
                f"rank {', '.join(map(str, missing[:8]))} of {self.world} did not arrive within "
                f"{self.options.timeout_s:.0f} s; present: {here}"
            )
        return Finding(
            "ranks",
            "fail",
            words,
            cause="its process failed as it started" if gone else _NOT_STARTED,
            cure="see its words above, and mend that first" if gone else _START_IT,
            ranks=tuple(gone or missing),
        )

    def _lost(self, step: Step, late: list[int]) -> Finding:
        gone = self.exits()
        silent = [] if gone else self._silent(late)
        ranks, limit = sorted(gone) or silent or late, f"{self._limit(step):.0f} s"
        if gone:
            words = "; ".join(f"{self.roll.name(rank)} {how}" for rank, how in gone.items())
            cause = "its process ended in the middle: out of memory, a native crash, or a kill"
        elif silent:
            words = f"{self.roll.names(silent)} did not finish within {limit}, and gives no sign of life"
            cause = "its process is stopped (Ctrl-Z, SIGSTOP, a debugger), or its machine is gone"
        else:
            words = f"{self.roll.names(late)} did not finish within {limit}"
            cause = "it hangs: a device or link that does not answer, or a firewall between ranks"
        return Finding(
            step.name,
            "fail",
            words,
            cause=cause,
            cure="see `dmesg` and nvidia-smi there; run `py-spy dump --pid PID` on a rank that hangs; "
            "--timeout gives a slow machine more time",
            ranks=tuple(ranks),
            hosts=self.roll.hosts_of(ranks),
        )

    def _silent(self, ranks: list[int]) -> list[int]:
        """Those without a sign of life for a while; the others may just wait for them."""
        before = {rank: self.board.read(f"pulse/{rank}") for rank in ranks}
        time.sleep(8 * PULSE_S)
        return [rank for rank in ranks if self.board.read(f"pulse/{rank}") == before[rank]]

    def _broke(self, step: Step, errors: dict[int, Account]) -> Finding:
        """The earliest error; those of other ranks mostly follow from it."""
        first = min(errors, key=lambda rank: errors[rank]["time"])
        message, known = errors[first]["message"], match(errors[first]["message"])
        on = f"{errors[first]['kind']} on {len(errors)} of {self.world} rank(s)"
        return Finding(
            step.name,
            "fail",
            f"{self.roll.name(first)}: {message}",
            cause=f"{on}; {known[0].cause}" if known else on,
            cure=known[0].cure if known else "mend what the message names, and check again",
            ranks=tuple(errors),
            hosts=self.roll.hosts_of(list(errors)),
        )

    def _ended(self, missing: list[int]) -> Finding:
        return Finding(
            self.waiting,
            "fail",
            f"ended from outside while waiting for rank {', '.join(map(str, missing[:8])) or '?'}",
            cause="the launcher ends all ranks when one of them dies, or someone stopped the check",
            cure="the launcher's own words say which rank died first",
            ranks=tuple(missing),
        )

    def _not_tried(self, step: Step, left: Sequence[Step]) -> None:
        names = [s.name for s in STEPS[STEPS.index(step) + 1 :]]
        names = [n for n in names if n != "data" or self.options.recipe]
        skipped = [n for n in names if n not in {s.name for s in left}]
        if skipped:
            words = f"not tried after the failure: {', '.join(skipped)}"
            self.findings.append(Finding(step.name, "note", words))


_NOT_STARTED = "it was never started, cannot reach the meeting point, or hangs as it starts"
_START_IT = (
    "start it with the same address, port and number of ranks; look for a firewall between the hosts; "
    "--timeout gives a slow file system more time"
)
