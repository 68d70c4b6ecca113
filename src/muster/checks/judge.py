"""Sends the steps to the ranks, collects their reports, and turns them into findings.

It runs no step itself, so a rank that hangs or dies cannot block it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from muster.checks.context import Options, RankReport, Step
from muster.checks.findings import Finding, RankNames, Report
from muster.checks.messages import HEARTBEAT_S, POLL_S, MessageStore
from muster.checks.steps import STEPS
from muster.diagnose.known import match
from muster.hardware import rehearsal

SHUTDOWN_S = 2.0  # for ranks to read that the check has ended
EXIT_SEEN_S = 0.2  # its peers' connection errors may come before a rank's exit is seen


class TerminatedError(Exception):
    """SIGTERM was received. What is known so far is still reported."""


class Judge:
    def __init__(
        self,
        messages: MessageStore,
        world: int,
        options: Options,
        exits: Callable[[], dict[int, str]] = dict,
    ) -> None:
        """`exits`: the ranks whose processes have ended, each with how, where this process can see them."""
        self.messages, self.world, self.options, self.exits = messages, world, options, exits
        self.findings: list[Finding] = []
        self.rank_names = RankNames({})
        self.sent = 0
        self.broken = False  # a rank raised an error, so the process group may be unusable
        self.step = "ranks"

    def run(self) -> Report:
        started = time.monotonic()
        try:
            self._run_steps()
        except TerminatedError:
            missing = [rank for rank in range(self.world) if self._report(rank) is None]
            self.findings.append(self._terminated(missing))
        report = Report(self.findings, self.world, list(self.rank_names.hosts()), 0.0)
        self._send({"step": None, "fit": report.fit})
        self._shut_down()
        return Report(report.findings, self.world, report.hosts, time.monotonic() - started)

    def _run_steps(self) -> None:
        self.messages.post("options", asdict(self.options))
        if not self._wait_for_ranks():
            return
        steps = [step for step in STEPS if step.name != "data" or self.options.recipe]
        while steps:
            step = steps.pop(0)
            found = self._run_step(step)
            self.findings += found
            if self.broken or (step.ends and any(f.status == "fail" for f in found)):
                # Where ranks cannot connect, host names may not resolve: still check that.
                steps = [s for s in steps if s.name == "network" and self.broken]
                self._not_tried(step, steps)
            if self.exits() or any(self._report(rank) is None for rank in range(self.world)):
                return  # a rank is gone

    def _wait_for_ranks(self) -> bool:
        def arrived() -> dict[int, Any]:
            found = {rank: self.messages.read(f"registered/{rank}") for rank in range(self.world)}
            return {rank: entry for rank, entry in found.items() if entry is not None}

        end = time.monotonic() + self.options.timeout_s
        while len(registered := arrived()) < self.world and time.monotonic() < end:
            if self.exits():
                break
            time.sleep(POLL_S)
        self.rank_names = RankNames(registered)
        missing = [rank for rank in range(self.world) if rank not in registered]
        if missing:
            self.findings.append(self._not_registered(missing))
        return not missing

    def _run_step(self, step: Step) -> list[Finding]:
        if step.timed and rehearsal.active():
            return [Finding(step.name, "note", f"left out: {rehearsal.WORDS}")]
        limit = self._limit(step)
        self._send({"step": step.name, "limit_s": limit})
        self.step = step.name
        reports, late = self._collect(limit + 5.0)  # a rank's own timeout comes first
        errors = {rank: report["error"] for rank, report in reports.items() if "error" in report}
        if errors:
            time.sleep(EXIT_SEEN_S)
        if late or self.exits():
            return [self._no_report(step, late)]
        if errors:
            self.broken = True
            return [self._raised(step, errors)]
        return step.judge(reports, self.rank_names)

    def _limit(self, step: Step) -> float:
        return max(step.limit_s, self.options.timeout_s)

    def _collect(self, limit_s: float) -> tuple[dict[int, RankReport], list[int]]:
        """Every rank's report, and the ranks without one."""
        end, reports = time.monotonic() + limit_s, dict[int, RankReport]()
        while len(reports) < self.world and time.monotonic() < end:
            for rank in set(range(self.world)) - set(reports):
                if (report := self._report(rank)) is not None:
                    reports[rank] = report
            if self.exits():  # even one that has reported: the others will fail in a collective
                break
            time.sleep(POLL_S)
        return reports, sorted(set(range(self.world)) - set(reports))

    def _report(self, rank: int) -> RankReport | None:
        report: RankReport | None = self.messages.read(f"report/{self.sent - 1}/{rank}")
        return report

    def _send(self, command: dict[str, Any]) -> None:
        self.messages.post(f"command/{self.sent}", command)
        self.sent += 1

    def _shut_down(self) -> None:
        """The process that hosts the store exits only after the ranks have read the last command."""
        end = time.monotonic() + SHUTDOWN_S
        for rank in self.rank_names.registered:
            while self.messages.read(f"done/{rank}") is None and time.monotonic() < end:
                if rank in self.exits():
                    break
                time.sleep(POLL_S)

    def _not_registered(self, missing: list[int]) -> Finding:
        gone = self.exits()
        registered = self.rank_names.names(sorted(self.rank_names.registered)) or "none"
        if gone:
            message = "; ".join(f"rank {rank} {how}" for rank, how in list(gone.items())[:4])
            message = f"{message}, before all ranks had joined; joined: {registered}"
        else:
            message = (
                f"rank {', '.join(map(str, missing[:8]))} of {self.world} did not join within "
                f"{self.options.timeout_s:.0f} s; joined: {registered}"
            )
        return Finding(
            "ranks",
            "fail",
            message,
            cause="its process failed during startup" if gone else _NOT_STARTED,
            cure="fix the error in its output above" if gone else _START_IT,
            ranks=tuple(gone or missing),
        )

    def _no_report(self, step: Step, late: list[int]) -> Finding:
        gone = self.exits()
        stopped = [] if gone else self._without_heartbeat(late)
        ranks, limit = sorted(gone) or stopped or late, f"{self._limit(step):.0f} s"
        if gone:
            message = "; ".join(f"{self.rank_names.name(rank)} {how}" for rank, how in gone.items())
            cause = "its process ended during the step: out of memory, a native crash, or SIGKILL"
        elif stopped:
            message = f"{self.rank_names.names(stopped)} did not finish within {limit}, and sends no heartbeat"
            cause = "its process is stopped (Ctrl-Z, SIGSTOP, a debugger), or its machine is gone"
        else:
            message = f"{self.rank_names.names(late)} did not finish within {limit}"
            cause = "it hangs: a device or link that does not respond, or a firewall between ranks"
        return Finding(
            step.name,
            "fail",
            message,
            cause=cause,
            cure="see `dmesg` and nvidia-smi there; run `py-spy dump --pid PID` on a rank that hangs; "
            "--timeout gives a slow machine more time",
            ranks=tuple(ranks),
            hosts=self.rank_names.hosts_of(ranks),
        )

    def _without_heartbeat(self, ranks: list[int]) -> list[int]:
        """Ranks whose heartbeat has stopped; the others may only wait for them."""
        before = {rank: self.messages.read(f"heartbeat/{rank}") for rank in ranks}
        time.sleep(8 * HEARTBEAT_S)
        return [rank for rank in ranks if self.messages.read(f"heartbeat/{rank}") == before[rank]]

    def _raised(self, step: Step, errors: dict[int, RankReport]) -> Finding:
        """The earliest error; those of other ranks mostly follow from it."""
        first = min(errors, key=lambda rank: errors[rank]["time"])
        message, known = errors[first]["message"], match(errors[first]["message"])
        on = f"{errors[first]['kind']} on {len(errors)} of {self.world} rank(s)"
        return Finding(
            step.name,
            "fail",
            f"{self.rank_names.name(first)}: {message}",
            cause=f"{on}; {known[0].cause}" if known else on,
            cure=known[0].cure if known else "fix what the message names, and check again",
            ranks=tuple(errors),
            hosts=self.rank_names.hosts_of(list(errors)),
        )

    def _terminated(self, missing: list[int]) -> Finding:
        return Finding(
            self.step,
            "fail",
            f"terminated by SIGTERM while waiting for rank {', '.join(map(str, missing[:8])) or '?'}",
            cause="the launcher terminates all ranks when one of them fails, or someone stopped the check",
            cure="see the launcher's output for the rank that failed first",
            ranks=tuple(missing),
        )

    def _not_tried(self, step: Step, left: Sequence[Step]) -> None:
        names = [s.name for s in STEPS[STEPS.index(step) + 1 :]]
        names = [n for n in names if n != "data" or self.options.recipe]
        skipped = [n for n in names if n not in {s.name for s in left}]
        if skipped:
            message = f"skipped after the failure: {', '.join(skipped)}"
            self.findings.append(Finding(step.name, "note", message))


_NOT_STARTED = "it was never started, cannot reach the rendezvous (MASTER_ADDR:MASTER_PORT), or hangs at startup"
_START_IT = (
    "start it with the same address, port and number of ranks; look for a firewall between the hosts; "
    "--timeout gives a slow file system more time"
)
