"""Reading a log line by line: the rank of each line, exceptions, and how processes ended.

Lines of several ranks are interleaved, each with the prefix of its launcher. Only lines that may
matter are kept, so logs may be larger than memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from muster.diagnose.known import Known, match, suspicious
from muster.diagnose.log_formats import Ending, endings, split_prefix
from muster.printable import SEQUENCES

MAX_GAP = 256  # lines after which a traceback without new lines has ended
LONGEST = 16_000  # characters of a line
REMEMBERED = 1024  # lines
KEPT = 200  # exceptions, endings and lines of native code; the first ones matter

NCCL_LINE = re.compile(r"^(?:\[[\d :-]+\] )?([\w.-]+):(\d+):\d+ \[-?\d+\] (.*)")
NCCL_RANK = re.compile(r"\brank (\d{1,9}) n[rR]anks \d+")
OPENING = "Traceback (most recent call last):"
EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*)(?::(?: (.*))?)?$")
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
NOT_PART = re.compile(
    r"^(frame #|Exception raised from|[WEIF]\d{4} |\[|=|-|Search for|CUDA kernel|$)"
)
# What a launcher raises when a rank has failed: never the cause.
LAUNCHER = (
    "ChildFailedError",
    "SignalException",
    "CalledProcessError",
    "ProcessRaisedException",
    "ProcessExitedException",
)
NATIVE = tuple(
    re.compile(pattern)
    for pattern in (
        r"NCCL WARN (.+)",
        r"^\[E\S* [\d:.]+ \S+\.cpp:\d+\] (.+)",
        r"^\s*what\(\):\s+(.+)",
        r"^(Fatal Python error: .+)",
        r"^((?:Segmentation fault|Bus error|Illegal instruction).*)",
        r"^(?:slurmstepd|srun|sbatch|salloc)\S*: error: (.+)",
        r"^((?:[\w.]+)?(?:Error|Exception): .+)",
    )
)
SUMMARY = re.compile(r"^ +(host|rank|exitcode|traceback) *: (.*)")
SPAWNED_WORDS = re.compile(r"^-- Process (\d{1,9}) terminated with the following error")


@dataclass
class ErrorText:
    """The error of one process: exceptions innermost first, or a line of native code."""

    rank: int | None
    line: int
    host: str | None = None
    chain: list[str] = field(default_factory=list)

    @property
    def known(self) -> list[Known]:
        return known_of(self.chain)

    @property
    def follows(self) -> bool:
        """Whether this is only the consequence of another rank's failure."""
        known = self.known
        return bool(known) and all(entry.level > 0 for entry in known)


def known_of(chain: Sequence[str]) -> list[Known]:
    """Causes first. Of several exceptions the outermost is the most specific."""
    found = {known.id: known for error in reversed(chain) for known in match(error)}
    return sorted(found.values(), key=lambda known: known.level)


@dataclass
class Seen:
    """Where a known failure first occurs, and how often."""

    known: Known
    line: int
    rank: int | None
    text: str
    count: int = 1
    file: str | None = None  # of a run's several logs

    @property
    def location(self) -> str:
        return f"{self.file}:{self.line}" if self.file else f"line {self.line}"


@dataclass
class _Traceback:
    error: ErrorText
    last: int  # line number of the last line that belongs to it
    complete: bool = False  # the exception itself has been read
    chained: bool = False
    kept: bool = False


class Scan:
    """Feed it every line once, in order; `default_rank` is that of lines without a prefix."""

    def __init__(self, default_rank: int | None = None) -> None:
        self.lines = 0
        self.raised: list[ErrorText] = []
        self.native: list[ErrorText] = []
        self.endings: list[Ending] = []
        self.seen: dict[str, Seen] = {}
        self._default = default_rank
        self._open: dict[int | None, _Traceback] = {}
        self._loose: int | None = None
        self._named: int | None = None
        self._ranks: dict[tuple[str, str], int] = {}
        self._summary: dict[str, str] | None = None
        self._root = False
        self._exit_code_line = 0  # line of the table's last exit code
        self._printer: int | None = None  # the rank whose lines the table is in
        self._without: set[str] = set()  # lines that tell nothing by themselves

    def feed_block(self, block: str) -> None:
        """Complete lines; a block without a hint of a failure is only counted."""
        if self._open or self._summary is not None or suspicious(block):
            for line, alike in groupby(block.split("\n")):
                self.feed(line)
                self._feed_again(line, sum(1 for _ in alike) - 1)
        else:
            self.lines += block.count("\n") + 1

    def _feed_again(self, line: str, times: int) -> None:
        """The same line so many times more. A log may be millions of one: outside of a traceback or a table each
        after the second only counts."""
        while times and (self._open or self._summary is not None or times == 1):
            self.feed(line)
            times -= 1
        if times:
            before = {key: seen.count for key, seen in self.seen.items()}
            self.feed(line)
            self.lines += times - 1
            for key, seen in self.seen.items():
                seen.count += (seen.count - before.get(key, seen.count)) * (times - 1)

    def feed(self, line: str) -> None:
        self.lines += 1
        if self._open and self.lines % MAX_GAP == 0:
            recent = self.lines - MAX_GAP
            self._open = {key: one for key, one in self._open.items() if one.last > recent}
        inside = bool(self._open) or self._summary is not None
        if not inside and (line in self._without or not suspicious(line)):
            return
        given, before = line, (len(self.native), len(self.endings))
        line = SEQUENCES.sub("", line.rstrip().rpartition("\r")[2][:LONGEST])[:4000]
        rank, text = split_prefix(line)
        if self._table(rank, text) or self._in_traceback(rank, text):
            return
        host = None
        if nccl := NCCL_LINE.match(text):
            host, pid, text = nccl.groups()
            if found := NCCL_RANK.search(text):
                self._ranks[host, pid] = int(found[1])
            rank = self._ranks.get((host, pid), rank)
        rank = self._default if rank is None else rank
        known = self._note_known(rank, text)
        self._note_ending(text)
        self._note_native(rank, host, text)
        told = known or nccl or before != (len(self.native), len(self.endings))
        if not (told or inside or self._open) and len(self._without) < REMEMBERED:
            self._without.add(given[:LONGEST])

    def _note_known(self, rank: int | None, text: str) -> bool:
        found = match(text)
        for known in found:
            if known.id in self.seen:
                self.seen[known.id].count += 1
            else:
                self.seen[known.id] = Seen(known, self.lines, rank, text)
        return bool(found)

    def _note_native(self, rank: int | None, host: str | None, text: str) -> None:
        if len(self.native) >= KEPT:
            return
        for pattern in NATIVE:
            if (found := pattern.search(text)) and not found[1].startswith("[PG"):
                self.native.append(ErrorText(rank, self.lines, host, [found[1]]))
                return

    def _note_ending(self, text: str) -> None:
        if len(self.endings) < KEPT:
            self.endings.extend(endings(text, self.lines))

    def _table(self, rank: int | None, text: str) -> bool:
        """torchrun's summary: one block of `key : value` lines per failed rank, the root cause last."""
        root = text.startswith("Root Cause (first observed failure)")
        if root or text == "Failures:":
            self._close_table()
            self._summary, self._root, self._printer = {}, root, rank
            return True
        if self._summary is None or rank != self._printer:
            return False
        if found := SUMMARY.match(text):
            self._summary.setdefault(found[1], found[2].strip())
            self._exit_code_line = self.lines if found[1] == "exitcode" else self._exit_code_line
            if found[1] == "traceback" and found[2].startswith(OPENING):
                self._begin(self._rank_of_table())
            return True
        if not text or text[0].isspace():
            if self._open:  # a traceback inside the table, two columns further in
                self._in_traceback(self._rank_of_table(), text[2:])
            return True
        self._close_table()
        if re.fullmatch(r"\[\d+\]:|-+", text):
            return True
        self._summary, self._root = None, False
        return text.startswith("=====")

    def _rank_of_table(self) -> int | None:
        found = re.match(r"\d{1,9}", (self._summary or {}).get("rank", ""))
        return int(found[0]) if found else None

    def _close_table(self) -> None:
        table = self._summary or {}
        if found := re.match(r"-?\d{1,9}", table.get("exitcode", "")):
            ending = Ending(
                self._rank_of_table(),
                int(found[0]),
                self._exit_code_line,
                table.get("host"),
                self._root,
            )
            self.endings.append(ending)
            self._note_known(ending.rank, f"exitcode: {ending.code}")
        self._open.clear()
        self._summary = {}

    def _begin(self, rank: int | None, chain_of: ErrorText | None = None) -> None:
        error = chain_of or ErrorText(rank, self.lines)
        self._open[rank] = _Traceback(error, self.lines, kept=chain_of is not None)

    def _in_traceback(self, rank: int | None, text: str) -> bool:
        """Whether this line belongs to a traceback: frames are not searched for known failures."""
        if named := SPAWNED_WORDS.match(text):
            self._named = int(named[1])
            return True
        key = self._unmarked(text) if rank is None else rank
        opened = self._open.get(key)
        if text.startswith(OPENING):
            self._begin(key, opened.error if opened and opened.chained else None)
            return True
        if opened is None:
            return False
        opened.last = self.lines
        return self._go_on(key, opened, text, prefixed=rank is not None)

    def _unmarked(self, text: str) -> int | None:
        """The rank of a line without a prefix: the one whose traceback began on the line before and had a
        prefix only there, the process that `spawn` just named, or the log's own rank."""
        for key, opened in self._open.items():
            if key is not None and not opened.complete and opened.last == self.lines - 1:
                self._loose = key if text[:1].isspace() else self._loose
        if self._loose in self._open and self._loose is not None:
            return self._loose
        return self._default if self._named is None else self._named

    def _go_on(self, key: int | None, opened: _Traceback, text: str, prefixed: bool) -> bool:
        if not opened.complete:
            if not text or text[0].isspace():
                return True
            if found := EXCEPTION.match(text):
                self._raise(opened, found)
            return found is not None
        if text.startswith(CHAINED):
            opened.chained = True
            return True
        if not text and not prefixed:
            return False
        chain = opened.error.chain
        more = (
            prefixed or chain[-1].endswith("Last error:") or text.startswith(("\t", "nccl", "Last"))
        )
        if more and not NOT_PART.match(text) and chain[-1].count("\n") < 6:
            chain[-1] += "\n" + text
            self._note_known(key, text)
            return True
        if not opened.chained:
            del self._open[key]
        return False

    def _raise(self, opened: _Traceback, found: re.Match[str]) -> None:
        kind = found[1].rpartition(".")[2]
        opened.complete, opened.chained = True, False
        opened.error.chain.append(f"{kind}: {found[2] or ''}".removesuffix(": "))
        self._note_known(opened.error.rank, found[0])
        self._note_ending(found[0])
        if kind not in LAUNCHER and not opened.kept and len(self.raised) < KEPT:
            opened.kept, opened.error.line = True, self.lines
            self.raised.append(opened.error)
