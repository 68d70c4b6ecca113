"""Each rank's heartbeat, and its stall report when it makes no progress.

`beat` records progress and costs a fraction of a microsecond. A thread writes the latest beat to
the run directory once a second (see `muster.observe.heartbeats`). When a rank is stalled (see `muster.observe.stall`), it
signals the others by a file in the run directory, every rank writes its stall report, and all exit with
the code `STALLED`. `muster.diagnose.hang` reads the reports:

    ranks/<rank>.stall.json    who, since when, in which phase and on which line
    ranks/<rank>.stacks.txt    the Python stack of every thread, also after a crash
    ranks/<rank>.flight.json   torch's flight recorder: the latest collectives of this rank
"""

from __future__ import annotations

import faulthandler
import json
import math
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

from muster.observe import heartbeats
from muster.observe.gather import Sender
from muster.observe.stall import ENDED as ENDED
from muster.observe.stall import STARTING as STARTING
from muster.observe.stall import Beat, Others, StallLimit, StallWatch
from muster.writing import make_folder, open_own, touch, write, write_json

STALLED = 75  # exit code of a rank that stalled, or exited because another one did
TICK_S = 1.0
GRACE_S = 5.0  # between a rank's report and its exit: the others need time for theirs
DUMPS = (
    heartbeats.OWN,
    heartbeats.OF_NODES,
    "*.stall.json",
    "*.stacks.txt",
    "*.flight.json",
    f"{heartbeats.STALL_FILE}*",
)
LINES = 6  # of its own code, in a rank's report

_MUSTER = str(Path(__file__).parents[1])
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))

_active: HeartbeatThread | None = None
_listener: Callable[[str], None] | None = None
_device: Callable[[], Mapping[str, Any] | None] | None = None


def beat(phase: str, step: int | None = None) -> None:
    """This rank made progress. Nothing is recorded before `start`."""
    if _active is not None:
        before, now = _active.last[1], time.monotonic()
        _active.last = (phase, before if step is None else step, now)
        if step not in (None, before):
            _active.limit.step_begins(now)
    if _listener is not None:
        _listener(phase)


def current_phase() -> str | None:
    """Of the latest beat."""
    return _active.last[0] if _active is not None else None


def listen(listener: Callable[[str], None] | None) -> None:
    """Call `listener` with each beat's phase, in the thread that beats: for the profiler."""
    global _listener
    _listener = listener


def measure(device: Callable[[], Mapping[str, Any] | None] | None) -> None:
    """Write what `device` returns into each heartbeat. It must answer at once: a heartbeat does not wait."""
    global _device
    _device = device


def note_line(line: Mapping[str, Any]) -> None:
    """The newest of ranks/<r>.jsonl, for whoever shows all ranks without opening a file of each."""
    if _active is not None:
        _active.line = line


def clear(folder: Path) -> None:
    """Remove the files of an earlier attempt. Rank 0 calls this before the rendezvous: an old stall file
    must not end the new attempt."""
    for pattern in DUMPS:
        for path in (folder / "ranks").glob(pattern):
            path.unlink(missing_ok=True)


def start(
    folder: Path,
    rank: int,
    stall_s: float | None,
    *,
    adaptive: bool = False,
    collector: str | None = None,
    attempt: str = "",
) -> None:
    """Write heartbeats of the calling thread; with `stall_s`, end the process when it makes no progress.
    `adaptive`: sooner within steps, by the time that they take. `collector`: the address of the process
    that writes those of this node. `attempt`: whose ranks end together; those of an earlier one may still run, on
    a node that was taken for lost."""
    global _active
    stop()
    limit = StallLimit(math.inf if stall_s is None else stall_s, adaptive=adaptive)
    _active = HeartbeatThread(folder / "ranks", rank, limit, Sender(collector), attempt)
    _active.start()


def stop() -> None:
    global _active
    if _active is not None:
        _active.end()
        _active = None


def failed(error: BaseException) -> None:
    """Write this rank's report of a failure. Does not return when it is about to exit as stalled."""
    if _active is not None:
        _active.failed(error)


class HeartbeatThread(threading.Thread):
    """`last` is the latest beat, `line` that of the latest step."""

    line: Mapping[str, Any] | None = None

    def __init__(
        self, folder: Path, rank: int, limit: StallLimit, sender: Sender, attempt: str
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._sender, self._attempt = sender, attempt
        self._stall_file = heartbeats.stall_file(folder, attempt)
        self.folder, self.rank, self.limit = folder, rank, limit
        self.last: Beat = (STARTING, None, time.monotonic())
        self._watch = StallWatch(limit, Others(folder, rank, sender.look))
        self._host, self._training_thread = os.uname().nodename, threading.get_ident()
        self._done, self._lock = threading.Event(), threading.Lock()
        self._reported = False
        make_folder(folder)
        self._stacks = open_own(self._path("stacks.txt"), "w")
        self._faults = faulthandler.is_enabled()
        faulthandler.enable(self._stacks)

    def run(self) -> None:
        self._write_heartbeat()
        while not self._done.wait(TICK_S):
            self.tick()

    def tick(self) -> None:
        self._write_heartbeat()
        if not math.isfinite(self.limit.longest_s):
            return
        why: str | None = None
        with suppress(OSError):  # of storage that fails for a moment: this thread must go on
            why = self._why_to_exit()
        if why:
            self._exit_stalled(why)

    def end(self) -> None:
        self._done.set()
        if self.is_alive():
            self.join()
        beat(ENDED)
        self._write_heartbeat()
        self._sender.close()
        faulthandler.cancel_dump_traceback_later()
        if self._faults:
            faulthandler.enable()
        else:
            faulthandler.disable()
        self._stacks.close()

    def failed(self, error: BaseException) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the launcher's signal to end must wait
        if not self._write_report("failed", traceback.extract_tb(error.__traceback__), error):
            self.join()  # the others are still writing; this thread ends the process
        if self._report["lost"] and "timed out" in str(error).lower():
            self._signal_stall()
            time.sleep(3 * TICK_S)
        time.sleep(0.2)  # a killed process may take a moment to end
        self._record_silent_ranks()

    def _why_to_exit(self) -> str | None:
        """The interpreter lock may be held for ever by native code, and this thread with it: then
        faulthandler's own thread, which needs no lock, writes the stacks and ends the process. It
        comes later than this one would, so that other ranks have written their reports."""
        if self.last[0] != STARTING:
            seconds = self.limit.longest_s + GRACE_S - 2 * TICK_S
            faulthandler.dump_traceback_later(seconds, exit=True, file=self._stacks)
        if self._watch.stalled(self.last, time.monotonic()):
            return "stalled"
        called = self._sender.stalled()  # the collector looks for all ranks of this node
        if called is None:
            called = self._stall_file.exists()
        return "called" if called else None

    def _exit_stalled(self, why: str) -> None:
        faulthandler.dump_traceback_later(3 * GRACE_S, exit=True, file=self._stacks)
        if why == "stalled":
            self._signal_stall()
        self._write_report(
            why, traceback.extract_stack(sys._current_frames()[self._training_thread])
        )
        time.sleep(GRACE_S)
        self._record_silent_ranks()
        # Not by logging, whose lock the rank may hold.
        os.write(2, f"[Rank {self.rank}] exits: {why} in {self.last[0]}\n".encode())
        os._exit(STALLED)

    def _write_report(
        self, why: str, stack: Iterable[traceback.FrameSummary], error: BaseException | None = None
    ) -> bool:
        """Write this rank's report, once: False when it was written before."""
        with self._lock:
            if self._reported:
                return False
            self._reported = True
            frames = list(stack)
            self._report = {
                **self._state(),
                "attempt": self._attempt,
                "why": why,
                "seconds": round(self._idle(), 1),
                "thread": str(self._training_thread),
                "lines": [_frame(f) for f in reversed(frames) if own_code(f.filename)][:LINES],
                "call": _collective_call(frames),
                "lost": error is not None and _is_peer_failure(error),
            }
            with suppress(OSError):
                write_json(self._path("stall.json"), self._report)
                self._write_stacks()
                flight = _flight_recorder()
                if flight is not None:
                    write(self._path("flight.json"), json.dumps(flight))
        return True

    def _signal_stall(self) -> None:
        with suppress(OSError):
            touch(self._stall_file)

    def _write_heartbeat(self) -> None:
        with suppress(OSError):  # a full disk must not end this thread
            measured = _device() if _device else None
            state = {**self._state(), "limit_s": self._limit_s()}
            state |= {"device": measured} if measured else {}
            state |= {"line": self.line} if self.line else {}
            if not self._sender.send(state):
                write_json(self._path("heartbeat.json"), state)

    def _record_silent_ranks(self) -> None:
        """Add the process states of this machine's ranks that wrote no report."""
        import psutil

        silent: dict[str, str] = {}
        for rank, state in heartbeats.read(self.folder).items():
            if state["host"] != self._host or (self.folder / f"{rank}.stall.json").exists():
                continue
            try:
                silent[str(rank)] = psutil.Process(state["pid"]).status()
            except psutil.NoSuchProcess:
                silent[str(rank)] = psutil.STATUS_DEAD
        with suppress(OSError):
            write_json(self._path("stall.json"), {**self._report, "silent": silent})

    def _write_stacks(self) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            self._stacks.write(f"Thread {names.get(ident, ident)} (most recent call last):\n")
            self._stacks.writelines(traceback.format_stack(frame))
        self._stacks.flush()

    def _state(self) -> Mapping[str, Any]:
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

    def _limit_s(self) -> float | None:
        limit = self.limit.of(self.last[0])
        return round(limit, 1) if math.isfinite(limit) else None

    def _idle(self) -> float:
        return time.monotonic() - self.last[2]

    def _path(self, name: str) -> Path:
        return self.folder / f"{self.rank}.{name}"


def own_code(file: str) -> bool:
    """The user's code or muster's, not Python's or a library's."""
    library = file.startswith((*_LIBRARIES, "<")) or "-packages/" in file
    return file.startswith(_MUSTER) or not library


def _frame(frame: traceback.FrameSummary) -> dict[str, Any]:
    return {
        "file": frame.filename,
        "line": frame.lineno,
        "function": frame.name,
        "code": frame.line,
    }


def _collective_call(frames: list[traceback.FrameSummary]) -> str | None:
    """The function of torch.distributed that the rank is in, if any."""
    inside = [f.name for f in frames if f.filename.endswith("distributed/distributed_c10d.py")]
    return inside[0] if inside else None


def _is_peer_failure(error: BaseException) -> bool:
    """Whether this error only means that another rank exited or did not join."""
    message = str(error).lower()
    return isinstance(error, RuntimeError) and ("gloo" in message or "nccl" in message)


def _flight_recorder() -> dict[str, Any] | None:
    """What torch's flight recorders hold, and which ranks each process group has. There are two,
    both on by default: one for gloo, one for NCCL where torch was built with it."""
    try:
        from muster.torch_internals import _distributed_c10d as c10d
        from muster.torch_internals import _world
    except (ImportError, AttributeError):
        return None
    recorders = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    dumps = [json.loads(getattr(c10d, name)()) for name in recorders if hasattr(c10d, name)]
    entries = [entry for dump in dumps for entry in dump.get("entries") or ()]
    groups = {name: sorted(_world.pg_group_ranks[g]) for g, name in _world.pg_names.items()}
    return {"entries": sorted(entries, key=lambda e: e["time_created_ns"]), "groups": groups}
