"""How a run failed: which rank failed first, its error, the likely cause and the cure.

When one rank fails, the others fail soon after in a collective. Their errors do not count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from signal import Signals
from typing import Any

from muster.diagnose import hang
from muster.diagnose.explain import cause_and_cure
from muster.errors import AGAIN
from muster.observe import shapes, storage

ABORT = "SIGABRT"  # how gloo and NCCL's watchdog end ranks whose peers are gone: rarely the cause
OOM_EVENTS = Path("/sys/fs/cgroup/memory.events")

Failure = dict[str, Any]


def collect(
    folder: Path,
    exit_codes: Mapping[int, int],
    world: int,
    oom_kills: int = 0,
    attempt: str | None = None,
) -> Failure:
    """The failure of a run whose ranks ended with `exit_codes`, as run.json keeps it.

    `oom_kills` is the kernel's count before the ranks were started. With `attempt`, what ranks of other attempts
    say does not count: those of a node that was taken for lost may still run.
    """
    for rank, code in exit_codes.items():
        if code == AGAIN:
            return _failure(rank, AGAIN, "It must start again with another setting.", None, None)
    killed = {rank: Signals(-code).name for rank, code in exit_codes.items() if code < 0}
    for rank, signal in killed.items():
        if signal != ABORT:
            return _killed(folder, rank, exit_codes[rank], signal, oom_kills)
    errors = _error_reports(folder, attempt)
    if not errors and (words := storage.problem(folder)):  # no rank could write a report
        rank, code = next(iter(exit_codes.items()), (0, 1))
        return _failure(rank, code, words, None, None)
    if errors and errors[0]["expected"]:
        return _from_error(errors[0])
    found = hang.analyse(folder, world, attempt)  # None where a rank raised an error of its own
    if found and (not killed or found.state == "mismatch"):
        return _hung(found, next(iter(exit_codes.values()), 1))
    if errors and not found:
        return _from_error(errors[0])
    for rank in killed:
        return _killed(folder, rank, exit_codes[rank], ABORT, oom_kills)
    if errors:
        return _from_error(errors[0])
    rank, code = next(iter(exit_codes.items()), (0, 1))
    what = f"Rank {rank} ended with exit code {code} and wrote no error report."
    return _failure(rank, code, what, *(cause_and_cure(f"exit code {code}") or (None, None)))


def _hung(found: hang.Hang, code: int) -> Failure:
    return _failure(
        found.rank, code, found.words, None, found.cure, hang=vars(found), host=found.host
    )


def _killed(folder: Path, rank: int, code: int, signal: str, oom_kills: int) -> Failure:
    what = f"Rank {rank} was killed by {signal}."
    if line := hang.last_line(folder, rank):
        what += f" It was at {line}."
    known = cause_and_cure(f"exitcode: {code} ({signal})")
    cause, cure = known or (None, None)
    if signal == "SIGKILL":
        by_kernel = count_oom_kills() > oom_kills
        cause = (
            "The kernel's out-of-memory (OOM) killer ended it: the ranks asked for more host memory "
            "than there is."
            if by_kernel
            else "If nobody sent it by hand, the machine most likely ran out of host memory."
        )
        cure = (
            "Use a smaller training.per_device_batch_size, fewer data.workers or fewer ranks; "
            "`dmesg | grep -i oom` shows more."
        )
    return _failure(rank, code, what, cause, cure, signal=signal)


def report_name(rank: int | str, attempt: str) -> str:
    return f"{rank}.error-{attempt}.json" if attempt else f"{rank}.error.json"


def _error_reports(folder: Path, attempt: str | None) -> list[dict[str, Any]]:
    """The ranks' error reports: messages meant for the user first, then the earliest."""
    names = shapes.ERROR_REPORTS if attempt is None else report_name("*", attempt)
    return sorted(
        shapes.error_reports(folder / "ranks", names),
        key=lambda error: (not error["expected"], error["time"]),
    )


def _from_error(error: dict[str, Any]) -> Failure:
    if error["expected"]:
        return _failure(error["rank"], 1, str(error["message"]), None, None, error=error)
    what = f"Rank {error['rank']}: {error['kind']}: {error['message']}"
    cause, cure = cause_and_cure(f"{error['kind']}: {error['message']}") or (None, None)
    return _failure(error["rank"], 1, what, cause, cure, error=error)


def of_launcher(error: Exception, expected: bool) -> Failure:
    """The supervisor itself failed."""
    own = {"expected": expected, "kind": type(error).__name__, "message": str(error)}
    if expected:
        return _failure(None, 1, str(error), None, None, error=own)
    what = f"The launcher: {type(error).__name__}: {error}"
    return _failure(None, 1, what, *(cause_and_cure(what) or (None, None)), error=own)


def lost_node(node: int, host: str, seconds: float) -> Failure:
    what = f"Node {node} ({host}) has sent no heartbeat for {seconds:.0f} s."
    cause = "Its network link is cut, or the machine is down or frozen."
    cure = f"Bring {host} back (can another node ping it?), then on every node: muster train RUN."
    return _failure(None, 1, what, cause, cure, host=host) | {"silent_node": node}


def first(failures: list[Failure]) -> Failure:
    """Of several nodes' reports: a node without heartbeat, a rank out of memory, a kill, a message meant
    for the user, a stall, the earliest error."""

    def priority(failure: Failure) -> tuple[bool, bool, bool, bool, bool, float]:
        error: dict[str, Any] = {"time": failure["time"], **(failure["error"] or {})}
        return (
            "silent_node" not in failure,
            failure["exit_code"] != AGAIN,
            failure["signal"] in (None, ABORT),
            not error.get("expected"),
            failure["hang"] is None,
            float(error["time"]),
        )

    return min(failures, key=priority)


def count_oom_kills() -> int:
    """Processes of this control group that the kernel has killed for memory so far."""
    try:
        counts = dict(line.split() for line in OOM_EVENTS.read_text().splitlines())
    except OSError:
        return 0
    return int(counts.get("oom_kill", 0))


def _failure(
    rank: int | None,
    exit_code: int,
    what: str,
    cause: str | None,
    cure: str | None,
    *,
    signal: str | None = None,
    error: dict[str, Any] | None = None,
    hang: dict[str, Any] | None = None,
    host: str | None = None,
) -> Failure:
    return {
        "rank": rank,
        "host": host or (error or {}).get("host") or os.uname().nodename,
        "exit_code": exit_code,
        "signal": signal,
        "error": error,
        "hang": hang,
        "what": what,
        "cause": cause,
        "cure": cure,
        "time": time.time(),
    }
