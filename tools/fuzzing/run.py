"""All cases of some readers, in worker processes that may hang, die or ask for too much."""

from __future__ import annotations

import multiprocessing as mp
import os
import shutil
import signal
import tempfile
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fuzzing import worker
from fuzzing.outcome import BAD, DIED, HANG, Outcome
from fuzzing.reader import READERS

SCRATCH = Path(tempfile.gettempdir()) / f"muster-fuzz-{os.getpid()}"
CHUNK = 50  # cases of a process: starting one takes a tenth of a second
SHOWN = 400  # characters of a problem


@dataclass
class Tally:
    """Of one reader."""

    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    found: dict[tuple[str, str], list[int]] = field(default_factory=dict)  # kind, detail → cases
    slowest: float = 0.0

    def add(self, case: int, outcome: Outcome) -> None:
        self.counts[outcome.kind] += 1
        self.slowest = max(self.slowest, outcome.seconds)
        if outcome.kind in BAD:
            self.found.setdefault((outcome.kind, outcome.detail), []).append(case)


@dataclass
class _Running:
    process: Any
    reader: str
    cases: range
    folder: Path
    heard: float = field(default_factory=time.monotonic)


def every(names: list[str], cases: int, seed: int, workers: int) -> dict[str, Tally]:
    """`cases` shared among the readers by their weights. Ctrl-C ends it with those that were read."""
    tallies = {name: Tally(seed) for name in names}
    whole = sum(READERS[name].weight for name in names)
    chunks: list[tuple[str, range]] = []
    for name in names:
        count = max(1, round(cases * READERS[name].weight / whole))
        chunks += [(name, range(at, min(at + CHUNK, count))) for at in range(0, count, CHUNK)]
    waiting = deque(sorted(chunks, key=lambda chunk: chunk[1].start))  # of all readers by turns
    running: dict[Connection, _Running] = {}
    numbers = iter(range(10**9))
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                pipe, one = _start(*waiting.popleft(), seed, SCRATCH / str(next(numbers)))
                running[pipe] = one
            for pipe in wait(list(running), timeout=1.0):
                assert isinstance(pipe, Connection)
                _hear(pipe, running, tallies, waiting)
            for pipe, one in list(running.items()):
                if time.monotonic() - one.heard > worker.WALL_S + 20:
                    os.killpg(one.process.pid, signal.SIGKILL)
                    _ended(pipe, running, tallies, waiting, HANG)
    except KeyboardInterrupt:
        pass
    finally:
        for one in running.values():
            one.process.kill()
    return tallies


def _start(name: str, cases: range, seed: int, folder: Path) -> tuple[Connection, _Running]:
    folder.mkdir(parents=True)
    ours, theirs = mp.Pipe(duplex=False)
    context = mp.get_context("fork")
    process = context.Process(target=worker.work, args=(theirs, name, seed, cases, folder))
    process.start()
    theirs.close()
    return ours, _Running(process, name, cases, folder)


def _hear(
    pipe: Connection,
    running: dict[Connection, _Running],
    tallies: dict[str, Tally],
    waiting: deque[tuple[str, range]],
) -> None:
    one = running[pipe]
    try:
        heard = pipe.recv()
    except (EOFError, OSError):
        return _ended(pipe, running, tallies, waiting, DIED)
    one.heard = time.monotonic()
    if heard is None:
        return _remove(pipe, running, waiting)
    case, outcome = heard
    tallies[one.reader].add(case, outcome)
    one.cases = range(case + 1, one.cases.stop)
    return None


def _ended(
    pipe: Connection,
    running: dict[Connection, _Running],
    tallies: dict[str, Tally],
    waiting: deque[tuple[str, range]],
    how: str,
) -> None:
    """The process is gone with a case in its hands."""
    one = running[pipe]
    one.process.join(5)
    lines: list[str] = []
    with suppress(OSError):
        lines = (one.folder / "stacks").read_text(errors="replace").splitlines()
    own = [line.strip() for line in lines if "/muster/" in line]
    why = f"exit code {one.process.exitcode}: {own[0] if own else ' '.join(lines)[:200]}"
    if len(one.cases):
        tallies[one.reader].add(one.cases.start, Outcome(how, why))
        one.cases = one.cases[1:]
    _remove(pipe, running, waiting)


def _remove(
    pipe: Connection, running: dict[Connection, _Running], waiting: deque[tuple[str, range]]
) -> None:
    one = running.pop(pipe)
    pipe.close()
    one.process.join(5)
    shutil.rmtree(one.folder, ignore_errors=True)
    if len(one.cases):
        waiting.appendleft((one.reader, one.cases))


def problems(tallies: dict[str, Tally]) -> list[str]:
    """Each kind once, with how to repeat its first case."""
    found = []
    for name, tally in tallies.items():
        alike: dict[tuple[str, str], list[tuple[int, str]]] = {}
        for (kind, detail), cases in tally.found.items():
            alike.setdefault((kind, detail.partition(": ")[0]), []).extend(
                (c, detail) for c in cases
            )
        for (kind, _), cases_of in sorted(alike.items(), key=lambda item: -len(item[1])):
            case, detail = min(cases_of)
            found.append(
                f"{len(cases_of)} × {name}: {kind}: {detail[:SHOWN]!r}\n"
                f"    python tools/fuzz.py {name} --seed {tally.seed} --case {case}"
            )
    return found
