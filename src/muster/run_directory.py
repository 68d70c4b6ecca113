"""The run directory: create it, find it, read its state, remove it.

Everything about a run is in its folder, so that any process can read it: the recipe, the plan, the
environment, the metrics, the logs, and `run.json` with the process that runs it and how it ended.
"""

from __future__ import annotations

import difflib
import fcntl
import itertools
import logging
import math
import os
import re
import secrets
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Literal

import psutil

from muster import writing
from muster.errors import LaunchError, MusterError, UnreadableError
from muster.hardware import rehearsal
from muster.observe import heartbeat, shapes
from muster.observe.events import write_again
from muster.observe.results import STOP_FILE, read_last
from muster.reading import json_file
from muster.reading.files import open_file
from muster.reading.text import in_one_line

log = logging.getLogger(__name__)

ENDED = ("finished", "failed", "stopped")
ALIVE = ("queued", "starting", "running")
ALIVE_FILE, ALIVE_EVERY_S = "alive", 5.0  # touched by the process that owns the run
STALE_S = 60.0  # since the last touch: the owner is gone
MOVABLE = ("checkpoints", "tensorboard")  # folders of a run that may be links
SIGNALLED = 143  # exit code of a run that saved and ended after a signal
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
Mode = Literal["private", "group", "umask"]
GRACE_S = 10.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True)
class Sign:
    """Of life of an owner that cannot be seen from here."""

    time: float  # by the clock of whoever gave it
    since: float  # when this process first saw it, by its own monotonic clock
    came: bool  # while this process looked


_signs: dict[Path, Sign] = {}  # the latest that this process has seen, of each run


@dataclass(frozen=True)
class Run:
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    def info(self) -> dict[str, Any]:
        with suppress(OSError):
            return self._info()
        return {}

    def _info(self) -> dict[str, Any]:
        with suppress(FileNotFoundError, UnreadableError):
            return shapes.info(json_file.read(self.path / "run.json"))
        return {}

    def update(self, **changes: Any) -> None:
        """OSError where storage fails: what is in run.json must not be lost because it could not be read."""
        with self._locked():
            info = self._info()
            self._check_writer(info)
            writing.write_json(self.path / "run.json", {**info, **changes})

    def check_owner(self) -> None:
        """Whether this process still owns the run: known to a supervisor only (muster.launch.owned_run)."""

    def _check_writer(self, info: dict[str, Any]) -> None:
        """The same of what run.json says, while no one else writes it."""

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time: each keeps what the others wrote. The lock of a dead process is released."""
        with writing.open_own(self.path / ".run.lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def begin(self, **changes: Any) -> None:
        """A new start, or a resumed one: a stop request and errors of an earlier start do not count."""
        info = self._info()
        write_again(self.path, str(info.get("state")), info.get("failure") or {}, self.signalled())
        (self.path / STOP_FILE).unlink(missing_ok=True)
        self.clear_error_reports()
        cleared = dict.fromkeys(("ended", "exit_code", "failure", "ranks", "slurm_job"))
        changes["rehearsal"] = rehearsal.active()
        changes |= {"begun": time.time(), "ran_before_s": self.ran_s(info)}
        log = self.path / "ranks" / "0.log"
        changes["old_log"] = log.stat().st_size if log.is_file() else 0
        self.update(state="starting", **{**cleared, **changes})

    def clear_error_reports(self) -> None:
        """Remove the error reports and heartbeats of an earlier attempt, and what a killed one half wrote."""
        heartbeat.clear(self.path)
        for folder in (self.path, self.path / "ranks"):
            writing.remove_abandoned(folder)
        for path in (self.path / "ranks").glob(shapes.ERROR_REPORTS):
            path.unlink(missing_ok=True)

    def claim(self) -> TextIOWrapper:
        """Become the run's one owner, until the file that is returned is closed in every process that
        has it open. The lock is the kernel's, on shared storage too: it ends with its holder."""
        file, end = writing.open_own(self.path / ".owner.lock"), time.monotonic() + GRACE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except BlockingIOError:
                if self.state() in ALIVE or time.monotonic() > end:
                    file.close()
                    raise self._taken() from None
                time.sleep(0.05)  # the owner of a run that has ended is about to exit
            except OSError as error:
                log.warning("%s: no locks on this file system (%s)", self.path, error.strerror)
                return file

    def open_to(self, mode: Mode) -> None:
        """Who may read it: its user, its group too, or whom the umask lets. Also what is in it already."""
        bits = {
            "private": writing.PRIVATE,
            "group": 0o750,
            "umask": 0o777 & ~writing.current_umask(),
        }
        writing.set_mode(self.path, bits[mode])

    def refuse_links(self) -> None:
        """A run directory may come from elsewhere, and what is written into it must not go anywhere else.
        Folders of much data may be moved to another disk."""
        for folder, folders, files, here in os.fwalk(self.path):
            for name in [*folders, *files]:
                path = Path(folder, name)
                try:
                    mode = os.lstat(name, dir_fd=here).st_mode
                except FileNotFoundError:
                    continue
                if stat.S_ISLNK(mode) and not (path.parent == self.path and name in MOVABLE):
                    raise LaunchError(
                        f"{path} is a link, and a run writes into no other place; remove it, or put a copy "
                        "of what it points to there"
                    )
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                    raise LaunchError(f"{path} is a pipe, a socket or a device; remove it")

    def _taken(self) -> LaunchError:
        info = self.info()
        return LaunchError(
            f"{self.name} is being run already, by process {info.get('pid')} on {info.get('host')}; "
            "watch it with `muster watch`, or end it with `muster stop`"
        )

    def own(self, process: int | None = None) -> str:
        """Write which process owns the run, so that others can check whether it is alive. Returns a token, by which
        this start knows later whether another one has taken the run over."""
        pid, token = process or os.getpid(), secrets.token_hex(8)
        facts = {"pid_started": _started(pid), "owned": time.time(), "owner": token}
        self.update(pid=pid, **facts, **here())
        return token

    def state(self) -> str:
        """queued (at a scheduler), starting, running, finished, failed, stopped; `interrupted` when
        its process is gone."""
        info = self.info()
        state = str(info.get("state", "unknown"))
        if state in ENDED or state == "queued" or self._alive(info):
            return state
        return "interrupted"

    def _alive(self, info: dict[str, Any]) -> bool:
        same, own = _same_place(info), here()
        if _rebooted(same):
            return False
        if same < set(own):  # another machine or container, whose processes cannot be seen here
            return self._gives_signs(info)
        # A process id may have been given to another one since.
        started = info.get("pid_started")
        return started is not None and _started(info["pid"]) == started

    def _gives_signs(self, info: dict[str, Any]) -> bool:
        """The clocks of two machines may differ: where this process has seen a sign come, or none for long, its own
        clock decides."""
        sign, now = self.last_sign(info), time.monotonic()
        before = _signs.get(self.path)
        if before is None or before.time != sign:
            before = Sign(sign, now, came=before is not None and sign > before.time)
            _signs[self.path] = before
        if now - before.since >= STALE_S:
            return False
        return before.came or time.time() - sign < STALE_S

    def last_sign(self, info: dict[str, Any]) -> float:
        """When its owner was last known to be alive, in seconds since 1970."""
        return max(self._touched(), float(info.get("owned", 0.0)))

    def _touched(self) -> float:
        with suppress(OSError):
            return (self.path / ALIVE_FILE).stat().st_mtime
        return 0.0

    def ran_s(self, info: dict[str, Any], now: float | None = None) -> float:
        """Seconds in all of its starts, without those between them and in queues: up to `now` where it is running,
        else up to the last sign of life."""
        begun = float(info.get("begun") or info.get("created") or math.inf)
        ended, touched = float(info.get("ended") or 0.0), self._touched()
        if now is not None:
            until = now
        elif ended and touched:  # what ended in a queue was not alive then
            until = min(ended, touched + ALIVE_EVERY_S)
        else:
            until = ended or touched
        return max(0.0, float(info.get("ran_before_s") or 0.0)) + max(0.0, until - begun)

    def elsewhere(self) -> str | None:
        """The host of the run's processes, where they cannot be reached from here."""
        info = self.info()
        same = _same_place(info)
        reachable = same == set(here()) or _rebooted(same)
        return None if reachable else str(info.get("host", "another host"))

    def processes(self) -> list[psutil.Process]:
        """The run's owner and its children. Empty on another host."""
        info = self.info()
        if self.elsewhere() or not self._alive(info):
            return []
        try:
            first = psutil.Process(info["pid"])
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def wait_for_owner(self, within_s: float = 15.0) -> None:
        """After the run's end: its owner writes the report and removes what was only for the ranks, then exits."""
        limit = time.monotonic() + within_s
        while self.info().get("pid") != os.getpid() and self.processes():
            if time.monotonic() >= limit:
                return
            time.sleep(0.05)

    def keep_alive(self, still_owner: Callable[[], bool] = lambda: True) -> None:
        """While this process is alive, and the owner, touch a file that others check, also on other machines."""

        def touch() -> None:
            while True:
                with suppress(OSError):  # shared storage fails at times
                    if not still_owner():
                        return
                    writing.touch(self.path / ALIVE_FILE)
                time.sleep(ALIVE_EVERY_S)

        threading.Thread(target=touch, daemon=True, name="alive").start()

    def signalled(self) -> bool:
        """Whether a signal, and not a user, asked it to stop: then STOP_FILE has the signal's name."""
        with suppress(OSError, UnreadableError), open_file(self.path / STOP_FILE) as file:
            return file.read(3) == b"SIG"
        return False

    def last_metrics(self) -> dict[str, Any]:
        return read_last(self.path / "metrics.jsonl")

    def results(self) -> dict[str, Any] | None:
        path = self.path / "training_results.json"
        return json_file.read(path) if path.is_file() else None


def check_name(name: str) -> str:
    """A name that is one folder below the folder of runs, and nowhere else."""
    if not re.fullmatch(NAME, name, re.ASCII) or name == "latest":
        raise MusterError(
            f"--run: {in_one_line(name)!r} cannot be the name of a run; take letters, digits, '.', '_' and '-', the "
            "first a letter or a digit, and not `latest`; logging.dir=FOLDER says where runs are"
        )
    return name


def create(
    root: Path,
    name: str,
    documents: dict[str, str],
    exact: str | None = None,
    mode: Mode = "private",
) -> Run:
    """A new folder `<name>-<time>`, or just `exact`, with `documents` in it; `latest` then points to
    it. Who may read it: `mode`."""
    path = None if exact is None else root / check_name(exact)
    try:
        root.mkdir(parents=True, exist_ok=True)
        if path:
            path.mkdir(mode=writing.PRIVATE)
        else:
            path = _new_folder(root, f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    except OSError as error:
        raise MusterError(f"logging.dir: cannot make a run in {root} ({error.strerror})") from None
    run = Run(path)
    writing.make_folder(path / "ranks")
    for file, text in documents.items():
        writing.write(path / file, text)
    run.update(state="starting", created=time.time())
    run.own()  # until its supervisor does: a failed start must not look alive for ever
    run.open_to(mode)
    _point_latest(root, path.name)
    return run


def _point_latest(root: Path, name: str) -> None:
    try:
        writing.point(root / "latest", name)
    except OSError:
        log.warning(
            "%s is no link of muster's and stays as it is, so `latest` is not this run; rename it",
            root / "latest",
        )


def _new_folder(root: Path, name: str) -> Path:
    """`name`, or where two runs start in the same second `name-2`, `name-3` …"""
    numbered = (f"{name}-{n}" for n in itertools.count(2))
    path = root / name
    while True:
        try:
            path.mkdir(mode=writing.PRIVATE)
            return path
        except FileExistsError:
            path = root / next(numbered)


def find(text: str, root: Path = Path("runs")) -> Run:
    """A run by folder, by name, or `latest`."""
    for candidate in (Path(text), root / text):
        if (candidate / "run.json").is_file():
            return Run(candidate.resolve())
    names = [run.name for run in every(root)]
    near = [n for n in names if n.startswith(text)] or difflib.get_close_matches(text, names)
    words = f"did you mean {', '.join(near[:3])}? Newest" if near else "newest"
    known = ", ".join(names[:5]) or "none"
    raise MusterError(f"no run {text!r}; {words} in {root}: {known}")


def every(root: Path) -> list[Run]:
    """All runs in `root`, newest first."""
    found = [Run(p) for p in root.glob("*") if not p.is_symlink() and (p / "run.json").is_file()]
    return sorted(found, key=lambda run: run.info().get("created", 0.0), reverse=True)


def stop(run: Run, wait_s: float, *, now: bool = False) -> str:
    """End an active run: request a checkpoint and an end, after `wait_s` send SIGTERM, and after `GRACE_S`
    more SIGKILL. `now` skips the request. Returns what it took: asked, terminated or killed."""
    if not now:
        writing.write(run.path / STOP_FILE, "")  # a signal's name in it would mean: requeue
        if _ended(run, wait_s):
            return "asked"
    if host := run.elsewhere():
        raise MusterError(
            f"{run.name} has not ended after {0 if now else wait_s:.0f} s. Its processes are on {host}, "
            f"which cannot be reached from here; {_remote_hint(run)}"
        )
    found, how, number = run.processes(), "terminated", signal.SIGTERM
    _signal(found, signal.SIGTERM)
    if not _ended(run, GRACE_S):
        how, number = "killed", signal.SIGKILL
        _signal(found + [p for p in run.processes() if p not in found], signal.SIGKILL)
        psutil.wait_procs(found, timeout=GRACE_S)
    if run.state() == "interrupted":  # it could not write that itself
        run.update(state="stopped", ended=time.time(), exit_code=128 + number)
    return how


def _remote_hint(run: Run) -> str:
    if job := run.info().get("slurm_job"):
        return f"`scancel {job}` ends its SLURM job"
    return "there, `muster stop --now` ends them"


def _ended(run: Run, within_s: float) -> bool:
    limit = time.monotonic() + within_s
    while run.state() in ALIVE:
        if time.monotonic() >= limit:
            return False
        time.sleep(0.1)
    return True


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # psutil detects a reused pid
            process.send_signal(number)


def here() -> dict[str, str]:
    """The scope of a process id: a host, its boot, and a container or none."""
    boot = pids = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pids = os.readlink("/proc/self/ns/pid")
    return {"host": os.uname().nodename, "boot": boot, "pids": pids}


def _same_place(info: dict[str, Any]) -> set[str]:
    """What of the place of a run's processes is the same here."""
    return {key for key, value in here().items() if info.get(key, value) == value}


def _rebooted(same: set[str]) -> bool:
    """This machine, since then."""
    return "host" in same and "boot" not in same


def _started(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process; None when it is gone, or a zombie."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if facts[0] == "Z" else int(facts[19])


def clean(root: Path, keep: int = 0) -> list[Run]:
    """The ended runs beyond the newest `keep`. Active ones are never removed."""
    return [run for run in every(root)[keep:] if run.state() not in ALIVE]


def remove(run: Run) -> None:
    if run.state() in ALIVE:
        raise MusterError(f"{run.name} is still {run.state()}; stop it first")
    root = run.path.parent
    shutil.rmtree(run.path)
    latest = root / "latest"
    if latest.is_symlink() and not latest.exists():
        latest.unlink()
        rest = every(root)
        if rest:
            writing.point(latest, rest[0].name)
