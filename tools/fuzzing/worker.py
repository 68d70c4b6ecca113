"""A process that reads cases one after the other, with limits on its memory and on each case's time."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from types import FrameType
from typing import NoReturn

from fuzzing.mutate import SECRET
from fuzzing.outcome import DIED, LEFT, MEMORY, TAKEN, WRONG, Hang, Outcome, of_error
from fuzzing.reader import READERS, Case

CPU_S, WALL_S = 10.0, 40.0  # of one case: processor time, and time with other processes beside it
GROWTH = 512 << 20  # bytes of memory that a case may add …
PER_BYTE = 32  # … and for each byte of its input
M_ARENA_MAX = -8  # of mallopt
ADDRESS_SPACE = 3 << 30  # beyond what the process has at the start


def work(
    pipe: Connection, name: str, seed: int, cases: range, folder: Path, quiet: bool = True
) -> None:
    """Send the outcome of each case."""
    limit(folder, quiet)
    for case in cases:
        pipe.send((case, run(name, seed, case, folder / "case")))
        if _size("VmSize") > _start + GROWTH:
            break  # what libraries keep would count against later cases
    pipe.send(None)


_start = 0


def limit(folder: Path, quiet: bool) -> None:
    global _start
    if quiet:
        logging.disable()
        warnings.simplefilter("ignore")
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
    os.setsid()
    with suppress(AttributeError, OSError):  # else each thread may reserve 64 MiB of addresses
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)
    signal.signal(signal.SIGPROF, _stop)
    signal.signal(signal.SIGALRM, _stop)
    sys.setswitchinterval(0.005)
    _start = _size("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (_start + ADDRESS_SPACE, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable((folder / "stacks").open("w"))


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise Hang


def run(name: str, seed: int, number: int, folder: Path, tell: bool = False) -> Outcome:
    """Case `number` of a reader. The same seed and number give the same input."""
    rng = Random(f"{seed} {name} {number}")
    shutil.rmtree(folder, ignore_errors=True)
    inside, outside = folder / "in", folder / "outside"
    inside.mkdir(parents=True)
    outside.mkdir()
    (outside / "secret.json").write_text(json.dumps({"secret": SECRET, "text": SECRET}))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    os.environ["HOME"] = str(folder / "home")
    os.chdir(inside)
    try:
        case = READERS[name].make(rng, inside)
    except Exception:  # the fuzzer's own
        return Outcome(DIED, f"making the case: {traceback.format_exc()}")
    before = {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}
    size = sum(path.lstat().st_size for path in before)
    held = _reset_peak()
    begin = time.monotonic()
    outcome = _read(case, tell)
    seconds = time.monotonic() - begin
    grown = _size("VmHWM") - held
    if outcome.kind in (TAKEN, WRONG) and grown > GROWTH + PER_BYTE * size:
        outcome = Outcome(MEMORY, f"{grown >> 20} MiB for {size} bytes of input")
    if left := _left(folder, before):
        outcome = Outcome(LEFT, f"{left}, after: {outcome.kind} {outcome.detail}"[:300])
    return Outcome(outcome.kind, outcome.detail, seconds)


def _read(case: Case, tell: bool) -> Outcome:
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    faulthandler.dump_traceback_later(WALL_S + 5)
    try:
        taken = case.read()
        _rest()
        wrong = case.wrong(taken)
        return Outcome(WRONG, wrong) if wrong else Outcome(TAKEN)
    except BaseException as error:
        _rest()
        if tell:
            traceback.print_exc()
        return of_error(error, case.names)
    finally:
        _rest()


def _rest() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    faulthandler.cancel_dump_traceback_later()


def _left(folder: Path, before: dict[Path, int]) -> str | None:
    """A file that looks half-written, or that lies where nothing may be written."""
    for path in folder.rglob("*"):
        if path in before and (path.is_dir() or path.lstat().st_mtime_ns == before[path]):
            continue
        words = str(path.relative_to(folder))
        if words.startswith("outside") or path.name == "ran":
            return f"{words} was written"
        if path.is_dir() or path.is_symlink() or path.name.endswith("lock"):
            continue
        if path.name.startswith(".") or "partial" in path.name or ".tmp" in path.name:
            return f"{words} is left"
        if path.suffix == ".json":
            with suppress(OSError):
                try:
                    json.loads(path.read_bytes())
                except ValueError:
                    return f"{words} is half-written"
    return None


def _size(key: str) -> int:
    """Of this process, in bytes."""
    with open("/proc/self/status") as status:
        return next((int(line.split()[1]) << 10 for line in status if line.startswith(key)), 0)


def _reset_peak() -> int:
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _size("VmRSS")
