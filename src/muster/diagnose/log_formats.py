"""Formats of launchers' logs: the rank in front of a line, and how a process ended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from signal import Signals

PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        r"\[rank(\d{1,9})\]:? ?",  # torch
        r"\[Rank (\d{1,9})\]:? ?",  # muster and many scripts
        r"\[[a-z_]+(\d{1,9})\]: ?",  # torchrun --tee: role and local rank
        r"\[(?:\S+@)?\d+,(\d{1,9})\]<std(?:out|err)>: ?",  # mpirun --tag-output
        r" {0,4}(\d{1,5}): ",  # srun --label
    )
)
DEEPSPEED = re.compile(r"sigkill_handler\] \[(.*)\] exits with return code = (-?\d{1,9})")
LOCAL_RANK = re.compile(r"--local_rank=(\d{1,9})")
MPIRUN = re.compile(r"process rank (\d{1,9}) with PID \d+ on node (\S+) exited on signal (\d{1,9})")
SRUN = re.compile(r"^srun: error: (\S+): tasks? (\d{1,9})\S*: (.+)")
SRUN_SIGNALS = {
    "Killed": 9,
    "Out Of Memory": 9,
    "Segmentation fault": 11,
    "Bus error": 7,
    "Aborted": 6,
    "Terminated": 15,
    "Illegal instruction": 4,
}
POD = re.compile(r"^\s*Exit Code: +(\d{1,9})")
SPAWNED = re.compile(r"process (\d{1,9}) terminated with signal (SIG\w+)")


@dataclass(frozen=True)
class Ending:
    """How a process ended. `root`: its launcher reports it as the first."""

    rank: int | None
    code: int
    line: int
    host: str | None = None
    root: bool = False

    @property
    def signal(self) -> str | None:
        return signal_name(self.code)


def signal_name(code: int) -> str | None:
    """Of a process (-9) or as a shell and a container report it (137); None for a plain exit code."""
    number = -code if code < 0 else code - 128
    try:
        return Signals(number).name
    except ValueError:
        return None


def split_prefix(line: str) -> tuple[int | None, str]:
    """The rank in front of a line, and the line without that prefix."""
    rank = None
    at = line.find("[rank")  # may come after a progress bar without a line end
    if at > 0 and PREFIXES[0].match(line, at):
        line = line[at:]
    while True:
        for prefix in PREFIXES:
            if found := prefix.match(line):
                rank, line = int(found[1]), line[found.end() :]
                break
        else:
            return rank, line


def endings(text: str, line: int) -> Iterator[Ending]:
    if found := DEEPSPEED.search(text):
        local = LOCAL_RANK.search(found[1])
        yield Ending(int(local[1]) if local else None, int(found[2]), line, root=True)
    elif found := MPIRUN.search(text):
        yield Ending(int(found[1]), -int(found[3]), line, found[2], root=True)
    elif found := SRUN.search(text):
        code = re.search(r"exit code (\d{1,9})", found[3])
        signal = SRUN_SIGNALS.get(found[3].partition(" (")[0])
        if code or signal:
            yield Ending(int(found[2]), int(code[1]) if code else -(signal or 0), line, found[1])
    elif (found := POD.search(text)) and found[1] != "0":
        yield Ending(None, int(found[1]), line)
    elif (found := SPAWNED.search(text)) and found[2] in Signals.__members__:
        yield Ending(int(found[1]), -Signals[found[2]].value, line, root=True)
