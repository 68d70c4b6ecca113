"""What went wrong in a log or a run: who failed first, what that means, what to do.

When one rank goes, the others fail soon after, and the launcher complains last and loudest. So the
last lines of a log are seldom the ones that matter.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from muster.diagnose.known import match
from muster.diagnose.marks import Ending, signal_name
from muster.diagnose.scan import Scan, Seen, Words, known_of
from muster.errors import MusterError

BLOCK = 1 << 20  # bytes read at a time
NOT_FATAL = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")  # sent by launchers and people
COMPRESSED = {
    b"\x1f\x8b": "zcat",
    b"BZh": "bzcat",
    b"\xfd7zXZ": "xzcat",
    b"\x28\xb5\x2f\xfd": "zstdcat",
}


@dataclass(frozen=True)
class Failure:
    """Who failed first. `chain` are its own words: exceptions, innermost first, or a line of native
    code."""

    chain: tuple[str, ...] = ()
    rank: int | None = None
    host: str | None = None
    exit_code: int | None = None
    signal: str | None = None
    line: int | None = None
    file: str | None = None
    for_user: bool = False  # its words already say what to do
    follows: bool = False  # it complains of another rank, whose own words are not here

    @property
    def words(self) -> str | None:
        return self.chain[0] if self.chain else None

    @property
    def sentence(self) -> str:
        who = "A process" if self.rank is None else f"Rank {self.rank}"
        who += f" on {self.host}" if self.host else ""
        if self.signal:
            return f"{who} was killed by {self.signal} (exit code {self.exit_code})."
        if self.words is None:
            return f"{who} ended with exit code {self.exit_code} and left no words of its own."
        how = "is the first to complain, but of another rank" if self.follows else "failed first"
        words = self.words if self.for_user else self.words.partition("\n")[0]
        return f"{who} {how}: {words}"

    @property
    def place(self) -> str | None:
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
        return {**vars(self), "first": first, "known": known}


def cause_and_cure(words: str) -> tuple[str, str] | None:
    """Of one error, given as `Kind: message`, `exitcode: -9 (SIGKILL)` or a line of a log."""
    for known in match(words):
        if not known.warning:
            return known.cause, known.cure
    return None


def explain(text: str, source: str = "log") -> Report:
    return explain_stream(io.BytesIO(text.encode()), source)


def explain_file(path: Path) -> Report:
    try:
        with path.open("rb") as file:
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
        elif len(rest) > BLOCK:  # no line is this long: take it as it is
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
    another rank; any other process that was killed; native code; followers; exit codes.

    SIGABRT is no kill from outside: the library that aborts has said why.
    """
    killed = [e for e in found.endings if e.signal not in (None, "SIGABRT", *NOT_FATAL)]
    own = [words for words in found.raised if not words.follows]
    native = [words for words in found.native if not words.follows]
    for ending in killed:
        if ending.root and all(words.rank != ending.rank for words in own):
            return _died(ending)
    if own:
        return _said(own[0], found.endings)
    if killed:
        return _died(killed[0])
    for words in [*native, *found.raised, *found.native]:
        return _said(words, found.endings)
    ended = sorted((e for e in found.endings if e.code), key=lambda ending: not ending.root)
    if ended:
        return _died(ended[0])
    for seen in sorted(found.seen.values(), key=lambda seen: (seen.known.level, seen.line)):
        if not seen.known.warning:
            return Failure((seen.text,), seen.rank, line=seen.line)
    return None


def _died(ending: Ending) -> Failure:
    return Failure((), ending.rank, ending.host, ending.code, ending.signal, ending.line)


def _said(words: Words, endings: Sequence[Ending]) -> Failure:
    root = next((e.rank for e in endings if e.root), None)
    rank = root if words.rank is None else words.rank
    mine = [e for e in endings if e.rank == rank and rank is not None]
    end = next((e for e in mine if e.signal not in NOT_FATAL), None)
    host = words.host or next((e.host for e in mine if e.host), None)
    said = Failure(tuple(words.chain), rank, host, line=words.line, follows=words.follows)
    return replace(said, exit_code=end.code) if end else said


def _likely(
    first: Failure | None, seen: Iterable[Seen]
) -> tuple[tuple[Seen, ...], str | None, str | None]:
    """What is known, the likely cause first. Whoever has a complaint of its own is not explained by
    what stands elsewhere in the log; whoever was killed, or complains of another, may be."""
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
        return tuple(found), (first.words if first.for_user else None), None
    return tuple(ordered), cause.cause, cause.cure


def explain_run(folder: Path) -> Report:
    """Of a run directory: what its supervisor and its ranks noted, and what their logs hold."""
    info = _json(folder / "run.json")
    scans = _scan_logs(folder)
    seen = [hit for found in scans.values() for hit in found.seen.values()]
    first = _from_run(folder, info) or _from_logs(scans)
    if info.get("state") in ("finished", "stopped"):
        first = None
    known, cause, cure = _likely(first, _merged(seen))
    noted = info.get("failure") or {}
    if first and noted.get("cause" if not noted.get("hang") else "cure"):
        cause, cure = noted.get("cause") or noted.get("what") or cause, noted.get("cure") or cure
    lines = sum(found.lines for found in scans.values())
    return Report(str(folder), lines, first, known, cause, cure)


def _scan_logs(folder: Path) -> dict[str, Scan]:
    logs = [folder / "launcher.log", *sorted((folder / "ranks").glob("*.log"))]
    scans = {}
    for path in logs:
        if path.is_file() and path.stat().st_size:
            rank = int(path.stem) if path.stem.isdigit() else None
            with path.open("rb") as file:
                found = scan(file, str(path), rank)
            scans[str(path.relative_to(folder))] = found
            for hit in found.seen.values():
                hit.file = str(path.relative_to(folder))
    return scans


def _merged(seen: Iterable[Seen]) -> list[Seen]:
    """One per known failure, whichever logs it stands in."""
    merged: dict[str, Seen] = {}
    for hit in seen:
        if hit.known.id in merged:
            merged[hit.known.id].count += hit.count
        else:
            merged[hit.known.id] = hit
    return list(merged.values())


def _from_run(folder: Path, info: dict[str, Any]) -> Failure | None:
    """What the supervisor found, else the earliest of the ranks' own words."""
    noted = info.get("failure") or {}
    errors = [_json(path) for path in (folder / "ranks").glob("*.error.json")]
    errors = sorted((e for e in errors if e), key=lambda e: (not e["expected"], e["time"]))
    error = noted.get("error") or (None if noted else next(iter(errors), None))
    if not (noted or error):
        return None
    error = error or {}
    words = noted.get("what") if noted.get("hang") else None
    if error:
        words = error["message"] if error["expected"] else f"{error['kind']}: {error['message']}"
    rank = noted.get("rank", error.get("rank"))
    code = noted.get("exit_code")
    return Failure(
        (words,) if words else (),
        rank,
        noted.get("host"),
        code,
        noted.get("signal") or (signal_name(code) if code and code < 0 else None),
        file="launcher.log" if rank is None else f"ranks/{rank}.log",
        for_user=bool(error.get("expected") or noted.get("hang")),
    )


def _from_logs(scans: dict[str, Scan]) -> Failure | None:
    """Of a run that could note nothing: the log whose failure is its own, the ranks' before others."""
    found = []
    for file, one in scans.items():
        if failure := _first(one):
            found.append((failure.follows, file == "launcher.log", replace(failure, file=file)))
    return min(found, key=lambda entry: entry[:2])[2] if found else None


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}
