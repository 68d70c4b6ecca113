"""What went wrong in a log or a run: which rank failed first, the likely cause, the cure.

When one rank fails, the others fail soon after, and the launcher reports last. So the last lines of a
log are seldom the ones that matter.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from muster.diagnose.known import match
from muster.diagnose.log_formats import Ending, signal_name
from muster.diagnose.scan import ErrorText, Scan, Seen, known_of
from muster.errors import MusterError
from muster.observe import shapes
from muster.observe.events import Restart, restarts
from muster.reading.files import open_file
from muster.reading.names import number

BLOCK = 1 << 20  # bytes read at a time
WENT_WELL = ("finished", "stopped")
GOES_ON = ("queued", "starting", "running")
NOT_FATAL = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")  # sent by launchers and people
COMPRESSED = {
    b"\x1f\x8b": "zcat",
    b"BZh": "bzcat",
    b"\xfd7zXZ": "xzcat",
    b"\x28\xb5\x2f\xfd": "zstdcat",
}


@dataclass(frozen=True)
class Failure:
    """The rank that failed first. `chain` is its error: exceptions, innermost first, or a line of native
    code."""

    chain: tuple[str, ...] = ()
    rank: int | None = None
    host: str | None = None
    exit_code: int | None = None
    signal: str | None = None
    line: int | None = None
    file: str | None = None
    for_user: bool = False  # its message already says what to do
    follows: bool = False  # it only reports another rank's failure, whose own error is not here

    @property
    def message(self) -> str | None:
        return self.chain[0] if self.chain else None

    @property
    def sentence(self) -> str:
        who = "A process" if self.rank is None else f"Rank {self.rank}"
        who += f" on {self.host}" if self.host else ""
        if self.signal:
            return f"{who} was killed by {self.signal} (exit code {self.exit_code})."
        if self.message is None:
            return f"{who} ended with exit code {self.exit_code} and wrote no error."
        how = "failed first, but only because another rank did" if self.follows else "failed first"
        message = self.message if self.for_user else self.message.partition("\n")[0]
        return f"{who} {how}: {message}"

    @property
    def location(self) -> str | None:
        if self.line is None:
            return self.file
        return f"{self.file}:{self.line}" if self.file else f"line {self.line}"


@dataclass(frozen=True)
class Report:
    """`known` in order of relevance. `cause` is None where nothing known explains the first failure."""

    source: str
    lines: int
    first: Failure | None
    known: tuple[Seen, ...]
    cause: str | None
    cure: str | None
    state: str | None = None  # of a run
    restarts: tuple[Restart, ...] = ()  # of a run: failures that it survived

    def as_dict(self) -> dict[str, Any]:
        known = [
            {
                "id": seen.known.id,
                "title": seen.known.title,
                "line": seen.line,
                "file": seen.file,
                "rank": seen.rank,
                "count": seen.count,
                "cause": seen.known.cause,
                "cure": seen.known.cure,
                "source": seen.known.source,
            }
            for seen in self.known
        ]
        first = vars(self.first) | {"what": self.first.sentence} if self.first else None
        restarts = [vars(restart) for restart in self.restarts]
        return {**vars(self), "first": first, "known": known, "restarts": restarts}


def cause_and_cure(message: str) -> tuple[str, str] | None:
    """Of one error, given as `Kind: message`, `exitcode: -9 (SIGKILL)` or a line of a log."""
    for known in match(message):
        if not known.warning:
            return known.cause, known.cure
    return None


def explain(text: str, source: str = "log") -> Report:
    return explain_stream(io.BytesIO(text.encode()), source)


def explain_file(path: Path) -> Report:
    try:
        with open_file(path) as file:
            return explain_stream(file, str(path))
    except OSError as error:
        raise MusterError(f"{path}: cannot be read ({error.strerror})") from None


def explain_stream(stream: IO[bytes], source: str) -> Report:
    """Reads block by block: a log may be larger than memory."""
    return _report(scan(stream, source), source)


def scan(stream: IO[bytes], source: str, rank: int | None = None) -> Scan:
    found, rest, start = Scan(rank), b"", True
    while block := stream.read(BLOCK):
        if start:
            _refuse_binary(block, source)
            start = False
        whole, newline, rest = (rest + block).rpartition(b"\n")
        if newline:
            found.feed_block(whole.decode("utf-8", "replace"))
        elif len(rest) > BLOCK:  # a line this long is processed in parts
            found.feed_block(rest.decode("utf-8", "replace"))
            rest = b""
    if rest:
        found.feed_block(rest.decode("utf-8", "replace"))
    if start:
        raise MusterError(f"{source} is empty: there is nothing to explain")
    return found


def _refuse_binary(block: bytes, source: str) -> None:
    for magic, tool in COMPRESSED.items():
        if block.startswith(magic):
            raise MusterError(f"{source} is compressed: {tool} {source} | muster explain -")
    if block.count(b"\0") > len(block) // 100:
        raise MusterError(f"{source} is a binary file, not a log")


def _report(found: Scan, source: str) -> Report:
    first = _first(found)
    known, cause, cure = _likely(first, found.seen.values())
    return Report(source, found.lines, first, known, cause, cure)


def _first(found: Scan) -> Failure | None:
    """In this order: a rank that its launcher saw killed; the earliest exception that is not about
    another rank; any other process that was killed; native code; errors about another rank; exit codes.

    SIGABRT is no kill from outside: the library that aborts has logged why.
    """
    killed = [e for e in found.endings if e.signal not in (None, "SIGABRT", *NOT_FATAL)]
    own = [error for error in found.raised if not error.follows]
    native = [error for error in found.native if not error.follows]
    for ending in killed:
        if ending.root and all(error.rank != ending.rank for error in own):
            return _from_ending(ending)
    if own:
        return _from_error(own[0], found.endings)
    if killed:
        return _from_ending(killed[0])
    for error in [*native, *found.raised, *found.native]:
        return _from_error(error, found.endings)
    ended = sorted((e for e in found.endings if e.code), key=lambda ending: not ending.root)
    if ended:
        return _from_ending(ended[0])
    for seen in sorted(found.seen.values(), key=lambda seen: (seen.known.level, seen.line)):
        if not seen.known.warning:
            return Failure((seen.text,), seen.rank, line=seen.line)
    return None


def _from_ending(ending: Ending) -> Failure:
    return Failure((), ending.rank, ending.host, ending.code, ending.signal, ending.line)


def _from_error(error: ErrorText, endings: Sequence[Ending]) -> Failure:
    root = next((e.rank for e in endings if e.root), None)
    rank = root if error.rank is None else error.rank
    mine = [e for e in endings if e.rank == rank and rank is not None]
    end = next((e for e in mine if e.signal not in NOT_FATAL), None)
    host = error.host or next((e.host for e in mine if e.host), None)
    failure = Failure(tuple(error.chain), rank, host, line=error.line, follows=error.follows)
    return replace(failure, exit_code=end.code) if end else failure


def _likely(
    first: Failure | None, seen: Iterable[Seen]
) -> tuple[tuple[Seen, ...], str | None, str | None]:
    """Known failures, the likely cause first. A rank with an error of its own is not explained by other
    lines of the log; one that was killed, or that reports another rank's failure, may be."""
    found = sorted(seen, key=lambda s: (s.known.level, s.line, s.known.order))
    if first is None:
        return tuple(found), None, None
    own = known_of(first.chain or (f"exitcode: {first.exit_code}",))
    if first.chain and (not own or own[0].level == 0):
        cause = own[0] if own else None
    else:
        causes = [s.known for s in found if s.known.level == 0]
        cause = next(iter([*causes, *own]), None)
    ordered = sorted(found, key=lambda s: (s.known is not cause, s.known not in own))
    if cause is None:
        return tuple(found), (first.message if first.for_user else None), None
    return tuple(ordered), cause.cause, cause.cure


def explain_run(folder: Path, state: str | None = None) -> Report:
    """Of a run directory: from the reports of its supervisor and ranks, and from their logs. `state` is
    what it is now, by default what run.json says."""
    info = shapes.info(shapes.document(folder / "run.json"))
    state = state or info.get("state")
    again = tuple(restarts(folder))
    scans = _scan_logs(folder)
    seen = [hit for found in scans.values() for hit in found.seen.values()]
    first = None if state in WENT_WELL else _from_run(folder, info)
    # Logs are of all starts: where there were several, they may tell of a failure that was survived.
    if state not in (*WENT_WELL, *GOES_ON) and not again:
        first = first or _from_logs(scans)
    known, cause, cure = _likely(first, _merged(seen))
    noted = info.get("failure") or {}
    if first and noted.get("cause" if not noted.get("hang") else "cure"):
        cause, cure = noted.get("cause") or noted.get("what") or cause, noted.get("cure") or cure
    lines = sum(found.lines for found in scans.values())
    return Report(str(folder), lines, first, known, cause, cure, state, again)


def _scan_logs(folder: Path) -> dict[str, Scan]:
    logs = [folder / "launcher.log", *sorted((folder / "ranks").glob("*.log"))]
    scans = {}
    for path in logs:
        if path.is_file() and path.stat().st_size:
            rank = number(path.stem)
            with open_file(path) as file:
                found = scan(file, str(path), rank)
            scans[str(path.relative_to(folder))] = found
            for hit in found.seen.values():
                hit.file = str(path.relative_to(folder))
    return scans


def _merged(seen: Iterable[Seen]) -> list[Seen]:
    """One per known failure, whichever logs it is in."""
    merged: dict[str, Seen] = {}
    for hit in seen:
        if hit.known.id in merged:
            merged[hit.known.id].count += hit.count
        else:
            merged[hit.known.id] = hit
    return list(merged.values())


def _from_run(folder: Path, info: dict[str, Any]) -> Failure | None:
    """What the supervisor recorded, else the earliest of the ranks' error reports."""
    noted = info.get("failure") or {}
    errors = sorted(
        shapes.error_reports(folder / "ranks"), key=lambda e: (not e["expected"], e["time"])
    )
    error = noted.get("error") or (None if noted else next(iter(errors), None))
    if not (noted or error):
        return None
    error = error or {}
    message = noted.get("what") if noted.get("hang") else None
    if error:
        message = error["message"] if error["expected"] else f"{error['kind']}: {error['message']}"
    rank = noted.get("rank", error.get("rank"))
    code = noted.get("exit_code")
    return Failure(
        (message,) if message else (),
        rank,
        noted.get("host"),
        code,
        noted.get("signal") or (signal_name(code) if code and code < 0 else None),
        file="launcher.log" if rank is None else f"ranks/{rank}.log",
        for_user=bool(error.get("expected") or noted.get("hang")),
    )


def _from_logs(scans: dict[str, Scan]) -> Failure | None:
    """Of a run without reports: the log with an error of its own, the ranks' before others."""
    found = []
    for file, one in scans.items():
        if failure := _first(one):
            found.append((failure.follows, file == "launcher.log", replace(failure, file=file)))
    return min(found, key=lambda entry: entry[:2])[2] if found else None
