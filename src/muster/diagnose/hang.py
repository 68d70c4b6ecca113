"""Which rank caused a hang, from the ranks' stall reports and flight recorders.

Ranks number their collectives, per process group, in the order they call them. So a rank that is
behind has a lower sequence number than the others, and one that skipped a collective has another
operation or shape under the same number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.diagnose.stall_files import Collective, RankState, read
from muster.observe.heartbeats import read as read_heartbeats

SLOW = 0.5  # a rank with a heartbeat within this share of the others' wait was slow, not stuck
CONTEXT = 6  # collectives before the one in question that should look alike
MISMATCH = "collective mismatch"  # gloo's message in a rank's log

SAME_CALLS = (
    "Every rank must call the same collectives in the same order: look for a branch around that line "
    "that only some ranks take."
)
CURES = {
    "stuck": "Look at that line. If it was only slow, raise distributed.stall_s and timeout_s.",
    "native": "Native code held the interpreter there: look at that line and the library it calls.",
    "slow": "It was still running: balance the work of the ranks, or raise distributed.stall_s and "
    "timeout_s.",
    "stopped": "Something stopped the process: SIGSTOP, a debugger or a suspended job. Once that is "
    "over, `muster train RUN` resumes from the last checkpoint.",
    "disk": "It waits for a disk or a network file system that does not answer: see dmesg on its host.",
    "gone": "See the end of its log, and dmesg on its host for the out-of-memory killer. "
    "`muster train RUN` resumes from the last checkpoint.",
    "silent": "Check whether its host is up and reachable, and the end of its log.",
    "mismatch": SAME_CALLS,
    "elsewhere": SAME_CALLS,
    "network": "All ranks arrived, so the network between them is at fault: run `muster check` on the hosts.",
}
PROCESS = {"stopped": "stopped", "tracing-stop": "stopped", "disk-sleep": "disk"}
GONE = ("dead", "zombie")


@dataclass(frozen=True)
class Hang:
    """`state` is a key of CURES; `line` is where `rank` was in its own code."""

    rank: int | None
    host: str | None
    state: str
    step: int | None
    phase: str | None
    line: str | None
    collective: str | None
    waiting: list[int]
    words: str
    cure: str


def analyse(folder: Path, world: int, attempt: str | None = None) -> Hang | None:
    """None where no rank stalled or lost its peer, or where one raised an error of its own. With `attempt`, of
    the reports of that one only."""
    heartbeats = read_heartbeats(folder / "ranks")
    ranks = [read(folder / "ranks", rank, heartbeats, attempt) for rank in range(world)]
    own_failure = any(r.report.get("why") == "failed" and not r.report["lost"] for r in ranks)
    native = any(r.native and not r.crash for r in ranks)
    if own_failure or not (native or any(r.report for r in ranks)):
        return None
    return _absent(ranks, folder) or _different(ranks) or _late(ranks) or _deadlock(ranks)


def last_line(folder: Path, rank: int) -> str | None:
    """The Python line of a rank that crashed (SIGSEGV, SIGABRT …)."""
    return read(folder / "ranks", rank).native


def _absent(ranks: Sequence[RankState], folder: Path) -> Hang | None:
    """Ranks that wrote no report."""
    absent = [r for r in ranks if not r.report]
    if not absent:
        return None
    seen = {int(k): v for r in ranks for k, v in r.report.get("silent", {}).items()}
    who = next((r for r in absent if seen.get(r.rank) in PROCESS or r.native), absent[0])
    status = seen.get(who.rank, "unknown")
    log = folder / "ranks" / f"{who.rank}.log"
    if who.crash and log.is_file() and MISMATCH in log.read_text(errors="replace"):
        return _mismatch_crash(ranks, who)
    if status in PROCESS:
        state = PROCESS[status]
    elif who.native and not who.crash:
        state = "native"
    else:
        state = "gone" if who.crash or status in GONE else "silent"
    what = {
        "stopped": "its process was stopped",
        "disk": "its process waits for a disk",
        "native": "native code held its interpreter",
        "gone": f"its process was gone ({who.crash})" if who.crash else "its process was gone",
        "silent": f"it wrote no report (its process: {status})",
    }[state]
    others = [r.rank for r in absent if r is not who]
    return _hang(ranks, who, state, what + (f"; nor did {_names(others)}" if others else ""))


def _mismatch_crash(ranks: Sequence[RankState], crashed: RankState) -> Hang:
    """gloo aborts a rank that is sent more than it expects: often not the one that called it wrongly."""
    for rank in ranks:
        group = [c for c in rank.collectives if rank.open and c.group == rank.open.group]
        due = _due(group[:-1])
        if due and due != group[-1].signature:
            what = (
                f"it called {group[-1]} where {' '.join(due)} was due, and {crashed.name} crashed on "
                f"what it was sent, at {crashed.native}"
            )
            return _hang(ranks, rank, "mismatch", what)
    return _hang(ranks, crashed, "mismatch", "it was sent what another collective expects")


def _different(ranks: Sequence[RankState]) -> Hang | None:
    """The first collective of a group that is not the same one on all ranks."""
    for group in sorted({c.group for r in ranks for c in r.collectives}):
        calls = {r.rank: r.calls(group) for r in ranks if r.last(group)}
        common = set.intersection(*(set(numbered) for numbered in calls.values()))
        odd = None
        for number in sorted(common, reverse=True):  # what came after a skipped one is shifted
            if len({numbered[number].signature for numbered in calls.values()}) == 1:
                break
            odd = number
        if odd is None:
            continue
        right = _right(calls, odd)
        wrong_rank = next(r for r, numbered in calls.items() if numbered[odd].signature != right)
        usual = next(r for r, numbered in calls.items() if numbered[odd].signature == right)
        what = f"it skipped that one and called {calls[wrong_rank][odd]} instead"
        if ranks[usual].line and ranks[usual].open == calls[usual][odd]:
            what += f"; rank {usual} was at {ranks[usual].line}, and it"
        return _hang(ranks, ranks[wrong_rank], "mismatch", what, calls[usual][odd])
    return None


def _right(calls: dict[int, dict[int, Collective]], number: int) -> tuple[str, str]:
    """Which of the ranks' calls was due: that of most ranks, else the one that followed in earlier
    steps, else the one of the rank that is not ahead: a rank that skips a collective gets ahead."""
    votes = Counter(numbered[number].signature for numbered in calls.values())
    (usual, most), *rest = votes.most_common()
    if most > rest[0][1]:
        return usual
    due = _due([c for n, c in sorted(next(iter(calls.values())).items()) if n < number])
    if due is not None and due in votes:
        return due
    return calls[min(calls, key=lambda rank: max(calls[rank]))][number].signature


def _due(before: Sequence[Collective]) -> tuple[str, str] | None:
    """What followed, the last time that the same collectives were called as at the end of `before`."""
    calls = [c.signature for c in before]
    for length in range(min(CONTEXT, len(calls) - 1), 0, -1):
        for end in range(len(calls) - 1, length - 1, -1):
            if calls[end - length : end] == calls[-length:]:
                return calls[end]
    return None


def _late(ranks: Sequence[RankState]) -> Hang | None:
    """A rank in its own code while others wait; the one without progress for the longest."""
    free = [r for r in ranks if not r.waits]
    if not free:
        return None
    waiting = [r for r in ranks if r.waits]
    missed = [r for r in free if any(_missed(w, r) for w in waiting)]
    who = max(missed or free, key=lambda r: r.seconds)
    longest_wait = max((r.seconds for r in waiting), default=0.0)
    if who.seconds < SLOW * longest_wait:
        return _hang(
            ranks, who, "slow", f"it made progress {who.seconds:.0f} s ago, but did not reach it"
        )
    return _hang(ranks, who, "stuck", f"it made no progress for {who.seconds:.0f} s")


def _deadlock(ranks: Sequence[RankState]) -> Hang:
    """All ranks wait: for each other in different groups, or for a lost message."""
    for rank in ranks:
        for other in ranks:
            if _missed(rank, other):
                what = f"it waited in {other.open or other.call}"
                return _hang(ranks, other, "elsewhere", what, rank.open)
    lost = next((str(r.open) for r in ranks if r.open), ranks[0].call)
    hosts = ", ".join(sorted({r.heartbeat["host"] for r in ranks}))
    return Hang(
        rank=None,
        host=None,
        state="network",
        step=ranks[0].heartbeat["step"],
        phase=ranks[0].heartbeat["phase"],
        line=ranks[0].line,
        collective=lost,
        waiting=[r.rank for r in ranks],
        words=f"Every rank waits in {lost}, and none is missing (on {hosts}).",
        cure=CURES["network"],
    )


def _missed(waiting: RankState, other: RankState) -> bool:
    """Whether `other` belongs to the group that `waiting` waits in and has not called as often."""
    if waiting.open is None or waiting is other:
        return False
    member = other.rank in waiting.groups.get(waiting.open.group_name, [other.rank])
    return member and other.last(waiting.open.group) < waiting.open.number


def _hang(
    ranks: Sequence[RankState],
    who: RankState,
    state: str,
    what: str,
    collective: Collective | None = None,
) -> Hang:
    waiting = [r for r in ranks if r is not who and r.waits]
    missed = [r.open for r in waiting if r.open and _missed(r, who)]
    found = collective or next(iter(missed or [r.open for r in waiting if r.open]), None)
    goal = str(found) if found else next((r.call for r in waiting), None)
    if goal:
        waited = _names([r.rank for r in waiting])
        words = f"{_start(who.name)} did not arrive at {goal}, where {waited} waited"
    else:
        words = _start(who.name)
    step, phase = who.heartbeat.get("step"), who.heartbeat.get("phase")
    when = (f", in step {step}" if step is not None else "") + (f", {phase}" if phase else "")
    at = f", at {who.line}" if who.line else ""
    return Hang(
        rank=who.rank,
        host=who.heartbeat.get("host"),
        state=state,
        step=step,
        phase=phase,
        line=who.line,
        collective=goal,
        waiting=[r.rank for r in waiting],
        words=f"{words}: {what}{when}{at}.",
        cure=CURES[state],
    )


def _start(name: str) -> str:
    return name[0].upper() + name[1:]


def _names(ranks: Sequence[int]) -> str:
    """rank 3; ranks 0, 1 and 2; ranks 0, 1, 2 and 61 more."""
    if len(ranks) <= 1:
        return f"rank {ranks[0]}" if ranks else "nobody"
    shown = [str(r) for r in ranks[:8]]
    last = shown.pop() if len(ranks) <= 8 else f"{len(ranks) - 8} more"
    return f"ranks {', '.join(shown)} and {last}"
