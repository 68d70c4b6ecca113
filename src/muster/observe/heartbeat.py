"""Each rank's sign of life, and its account of where it stood when it got no further.

`beat` notes progress and costs a fraction of a microsecond. A thread writes the latest note to
`ranks/<rank>.heartbeat.json` once a second. When a rank has not beaten for `stall_s`, it calls the
others (one file in the run directory), every rank writes down where it stands, and all leave with
the exit code `STALLED`. `muster.diagnose.hang` reads what they wrote:

    ranks/<rank>.stall.json    who, since when, in which phase and on which line
    ranks/<rank>.stacks.txt    the Python stack of every thread, also after a crash
    ranks/<rank>.flight.json   torch's flight recorder: the latest collectives of this rank
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from muster.observe.results import write_json

STALLED = 75  # exit code of a rank that stalled, or left because another one did
TICK_S = 1.0
GRACE_S = 5.0  # between a rank's account and its end: the others need time for theirs
ENDED = "ended"
STARTING = "starting"  # until the first beat; building and loading may take any time
CALL = "stalled"  # in ranks/: a rank stalled, and all should say where they stand
DUMPS = ("*.heartbeat.json", "*.stall.json", "*.stacks.txt", "*.flight.json", CALL)
LINES = 6  # of its own code, in a rank's account

_MUSTER = str(Path(__file__).parents[1])
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))

_watch: Watch | None = None
_listener: Callable[[str], None] | None = None


def beat(phase: str, step: int | None = None) -> None:
    """This rank got further. Nothing is noted before `start`."""
    if _watch is not None:
        _watch.last = (phase, _watch.last[1] if step is None else step, time.monotonic())
    if _listener is not None:
        _listener(phase)


def listen(listener: Callable[[str], None] | None) -> None:
    """Hear each beat's phase, in the thread that beats: a profiler marks them."""
    global _listener
    _listener = listener


def clear(folder: Path) -> None:
    """Away with what an earlier attempt wrote. Rank 0 calls this before the ranks meet: a call that
    is already answered must not be heard again."""
    for pattern in DUMPS:
        for path in (folder / "ranks").glob(pattern):
            path.unlink(missing_ok=True)


def start(folder: Path, rank: int, stall_s: float | None) -> None:
    """Show signs of life of the calling thread; with `stall_s`, end the process when they cease."""
    global _watch
    stop()
    _watch = Watch(folder / "ranks", rank, stall_s)
    _watch.start()


def stop() -> None:
    global _watch
    if _watch is not None:
        _watch.end()
        _watch = None


def failed(error: BaseException) -> None:
    """This rank's account of a failure. Does not return when it is about to leave as stalled."""
    if _watch is not None:
        _watch.failed(error)


class Watch(threading.Thread):
    """`last` is the latest beat: phase, step, and when by the monotonic clock."""

    def __init__(self, folder: Path, rank: int, stall_s: float | None) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.folder, self.rank, self.stall_s = folder, rank, stall_s
        self.last: tuple[str, int | None, float] = (STARTING, None, time.monotonic())
        self._host, self._trains = os.uname().nodename, threading.get_ident()
        self._done, self._lock = threading.Event(), threading.Lock()
        self._told = False
        folder.mkdir(parents=True, exist_ok=True)
        self._stacks = self._path("stacks.txt").open("w")
        self._faults = faulthandler.is_enabled()
        faulthandler.enable(self._stacks)

    def run(self) -> None:
        self._show()
        while not self._done.wait(TICK_S):
            self._show()
            if self.stall_s is not None and self._stalled(self.stall_s):
                self._leave()

    def end(self) -> None:
        self._done.set()
        if self.is_alive():
            self.join()
        beat(ENDED)
        self._show()
        faulthandler.cancel_dump_traceback_later()
        if self._faults:
            faulthandler.enable()
        else:
            faulthandler.disable()
        self._stacks.close()

    def failed(self, error: BaseException) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the launcher's dismissal can wait
        if not self._tell("failed", traceback.extract_tb(error.__traceback__), error):
            self.join()  # the others are still writing; this thread ends the process
        if self._account["lost"] and "timed out" in str(error).lower():
            self._call()
            time.sleep(2 * TICK_S)
        time.sleep(0.2)  # a rank that was killed took a moment to go
        self._look_around()

    def _stalled(self, stall_s: float) -> bool:
        """The interpreter lock may be held for ever by native code, and this thread with it: then
        faulthandler's own thread, which needs no lock, writes the stacks and ends the process. It
        comes later than this one would, so that other ranks have written their accounts."""
        if self.last[0] != STARTING:
            faulthandler.dump_traceback_later(
                stall_s + GRACE_S - 2 * TICK_S, exit=True, file=self._stacks
            )
            if self._idle() >= stall_s:
                return True
        return (self.folder / CALL).exists()

    def _leave(self) -> None:
        faulthandler.dump_traceback_later(3 * GRACE_S, exit=True, file=self._stacks)
        why = "called"
        if self._idle() >= (self.stall_s or 0.0):
            why = "stalled"
            self._call()
        self._tell(why, traceback.extract_stack(sys._current_frames()[self._trains]))
        time.sleep(GRACE_S)
        self._look_around()
        # Not by logging, whose lock the rank may hold.
        os.write(2, f"[Rank {self.rank}] leaves: {why} in {self.last[0]}\n".encode())
        os._exit(STALLED)

    def _tell(
        self, why: str, stack: Iterable[traceback.FrameSummary], error: BaseException | None = None
    ) -> bool:
        """Write this rank's account, once: False when it was written before."""
        with self._lock:
            if self._told:
                return False
            self._told = True
            frames = list(stack)
            self._account = {
                **self._sign(),
                "why": why,
                "seconds": round(self._idle(), 1),
                "thread": str(self._trains),
                "lines": [_about(f) for f in reversed(frames) if own(f.filename)][:LINES],
                "call": _collective_call(frames),
                "lost": error is not None and _lost_another(error),
            }
            with suppress(OSError):
                write_json(self._path("stall.json"), self._account)
                self._write_stacks()
                flight = _flight()
                if flight is not None:
                    self._path("flight.json").write_text(json.dumps(flight))
        return True

    def _call(self) -> None:
        with suppress(OSError):
            (self.folder / CALL).touch()

    def _show(self) -> None:
        with suppress(OSError):  # a full disk must not end the watch
            write_json(self._path("heartbeat.json"), self._sign())

    def _look_around(self) -> None:
        """Add what became of ranks of this machine that gave no account."""
        import psutil

        silent: dict[str, str] = {}
        for path in self.folder.glob("*.heartbeat.json"):
            rank = path.name.split(".")[0]
            with suppress(OSError, ValueError):
                sign = json.loads(path.read_text())
                if sign["host"] != self._host or (self.folder / f"{rank}.stall.json").exists():
                    continue
                try:
                    silent[rank] = psutil.Process(sign["pid"]).status()
                except psutil.NoSuchProcess:
                    silent[rank] = psutil.STATUS_DEAD
        with suppress(OSError):
            write_json(self._path("stall.json"), {**self._account, "silent": silent})

    def _write_stacks(self) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            self._stacks.write(f"Thread {names.get(ident, ident)} (most recent call last):\n")
            self._stacks.writelines(traceback.format_stack(frame))
        self._stacks.flush()

    def _sign(self) -> Mapping[str, Any]:
        """`since`: when the phase was last noted; both times in seconds since 1970."""
        (phase, step, _), now = self.last, time.time()
        return {
            "rank": self.rank,
            "host": self._host,
            "pid": os.getpid(),
            "step": step,
            "phase": phase,
            "since": now - self._idle(),
            "time": now,
        }

    def _idle(self) -> float:
        return time.monotonic() - self.last[2]

    def _path(self, name: str) -> Path:
        return self.folder / f"{self.rank}.{name}"


def own(file: str) -> bool:
    """The user's code or muster's, not Python's or a library's."""
    library = file.startswith((*_LIBRARIES, "<")) or "-packages/" in file
    return file.startswith(_MUSTER) or not library


def _about(frame: traceback.FrameSummary) -> dict[str, Any]:
    return {
        "file": frame.filename,
        "line": frame.lineno,
        "function": frame.name,
        "code": frame.line,
    }


def _collective_call(frames: list[traceback.FrameSummary]) -> str | None:
    """The function of torch.distributed that the rank stands in, if any."""
    inside = [f.name for f in frames if f.filename.endswith("distributed/distributed_c10d.py")]
    return inside[0] if inside else None


def _lost_another(error: BaseException) -> bool:
    """Whether this failure only tells that another rank went away or did not come."""
    words = str(error).lower()
    return isinstance(error, RuntimeError) and ("gloo" in words or "nccl" in words)


def _flight() -> dict[str, Any] | None:
    """What torch's flight recorders hold, and which ranks each process group has. There are two,
    both on by default: one for gloo, one for NCCL where torch was built with it."""
    try:
        import torch._C._distributed_c10d as c10d
        from torch.distributed.distributed_c10d import _world
    except ImportError:
        return None
    recorders = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    dumps = [json.loads(getattr(c10d, name)()) for name in recorders if hasattr(c10d, name)]
    entries = [entry for dump in dumps for entry in dump.get("entries") or ()]
    groups = {name: sorted(_world.pg_group_ranks[g]) for g, name in _world.pg_names.items()}
    return {"entries": sorted(entries, key=lambda e: e["time_created_ns"]), "groups": groups}
