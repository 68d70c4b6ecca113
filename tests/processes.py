"""Starting programs in tests: muster, torchrun and other Python programs, as a user starts them.

They are forked from a server that has imported torch (`fork_server.py`), which takes milliseconds
where a new interpreter takes seconds. `real=True` starts a new one: for what depends on how a process
begins, such as the order of its imports or variables that libraries read while they are loaded.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

import fork_server
from fork_server import PLAIN_POPEN
from muster.hardware import rehearsal

ADDRESS = "MUSTER_TESTS_FORK_SERVER"  # where it listens; the same for all of pytest's workers
PROGRAMS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # torchrun, deepspeed, python
MUSTER = [sys.executable, "-m", "muster"]
LIMIT_S = 240.0
environment: dict[str, str] = {}  # of the server; a test that changes its own does not change that


def prepare(folder: Path) -> None:
    """Name the server's address; whoever first needs it starts it."""
    os.environ[ADDRESS] = f"{folder}/{os.getpid()}"


def _connect() -> socket.socket:
    address = os.environ[ADDRESS]
    with open(address + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(address):
            _start_server(address)
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(address)
    except OSError:
        raise _gone() from None
    return client


def _gone() -> RuntimeError:
    return RuntimeError(
        f"the fork server is gone: {Path(os.environ[ADDRESS] + '.log').read_text()}"
    )


def _start_server(address: str) -> None:
    owner = address.rpartition("/")[2]
    program = f"import fork_server; fork_server.main({address!r}, {owner!r})"
    path = os.pathsep.join(
        filter(None, [str(Path(__file__).parent), environment.get("PYTHONPATH")])
    )
    with open(address + ".log", "wb") as log:
        server = PLAIN_POPEN(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**environment, "PYTHONPATH": path},
        )
    while not os.path.exists(address):
        if server.poll() is not None:
            raise RuntimeError(f"the fork server failed: {Path(address + '.log').read_text()}")
        time.sleep(0.02)


def forking_environment(folder: Path) -> dict[str, str]:
    """Variables under which a shell's `python`, `torchrun` and the like are forked from the server."""
    _connect().close()
    programs = folder / "bin"
    programs.mkdir(parents=True)
    proxy = folder / "forked_python"
    source = Path(__file__).with_name("forked_python.py").read_text()
    proxy.write_text(f"#!{sys.executable} -IS\n{source}")
    proxy.chmod(0o755)
    for name in ("python", "python3", "torchrun", "deepspeed", "muster"):
        (programs / name).symlink_to(proxy)
    return {
        "VIRTUAL_ENV": str(folder),
        "PATH": f"{programs}:{PROGRAMS}",
        "MUSTER_TESTS_PROGRAMS": str(Path(sys.executable).parent),
    }


class ForkedPopen(subprocess.Popen[Any]):
    """A Popen that asks the server for Python programs of this environment; the server reaps them.

    `preexec_fn` must be picklable. Other programs are started as ever.
    """

    _server: socket.socket | None = None

    def _execute_child(self, *given: Any) -> None:
        asked = fork_server.popen_arguments(self, *given)
        order = fork_server.order_for(asked)
        if order is None:
            return super()._execute_child(*given)
        descriptors = order.pop("descriptors")
        order["before"] = pickle.dumps(order["before"])
        content = pickle.dumps({**order, "numbers": list(descriptors)})
        message = len(content).to_bytes(8, "little") + content
        self._server = _connect()
        sent = socket.send_fds(self._server, [message], list(descriptors.values()))
        if sent < len(message):  # a program may have ended by now, and the server hung up
            self._server.sendall(message[sent:])
        self.pid = int.from_bytes(self._answer(), "little")
        return fork_server.started(self, asked)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._server is None:
            return super()._try_wait(wait_flags)
        timeout = 0.0 if wait_flags & os.WNOHANG else None
        if not select.select([self._server], [], [], timeout)[0]:
            return 0, 0
        status = int.from_bytes(self._answer(), "little")
        self._server.close()
        return self.pid, status

    def _answer(self) -> bytes:
        assert self._server is not None
        answer = self._server.recv(8)
        if not answer:
            raise _gone()
        return answer

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if self._server is None:
            return super()._internal_poll(*given, **named)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def start(
    command: Sequence[str | Path],
    folder: Path | None = None,
    *,
    real: bool = False,
    errors: int | None = subprocess.STDOUT,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> subprocess.Popen[str]:
    """The command in `folder`, its words in a pipe; `env` adds to this process's variables."""
    words = [str(word) for word in command]
    variables = {**os.environ, "PATH": PROGRAMS, "COLUMNS": "200", **(env or {})}
    settings = {"stdout": subprocess.PIPE, "stderr": errors, "text": True, "cwd": folder, **options}
    real = real or rehearsal.active()  # a GPU cannot be used after a fork
    return (PLAIN_POPEN if real else ForkedPopen)(words, env=variables, **settings)


def run(
    command: Sequence[str | Path],
    folder: Path | None = None,
    *,
    code: int | None = 0,
    stdin: str | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """The command, run to its end; its exit code must be `code`, unless that is None."""
    if stdin is not None:
        options["stdin"] = subprocess.PIPE
    process = start(command, folder, errors=subprocess.PIPE, **options)
    try:
        out, err = process.communicate(stdin, timeout=LIMIT_S)
    except BaseException:
        process.kill()
        raise
    assert code is None or process.returncode == code, f"{out}{err}"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def muster(
    *arguments: str | Path, folder: Path | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    return run([*MUSTER, *arguments], folder, **options)


def python_path(*folders: Path) -> dict[str, str]:
    """PYTHONPATH with these folders first."""
    given = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), *([given] if given else [])])}


def runs_module(process: psutil.Process, name: str) -> bool:
    """Whether it is a `python -m NAME …`, forked or not."""
    try:
        return f"-m {name}" in " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return False


def lives(pid: int) -> bool:
    """Not if it is only waiting to be reaped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def free_port() -> int:
    """Below those that the system gives to whoever asks for any: it stays free until it is taken."""
    while True:
        number = random.SystemRandom().randrange(20_000, 29_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", number))
            return number


@contextmanager
def fixed_port(number: int) -> Iterator[None]:
    """For a command that names the port, or whose launcher has it as its default: one at a time."""
    with open(f"{os.environ[ADDRESS]}.port-{number}", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def press_ctrl_c(watcher: subprocess.Popen[str]) -> str:
    """Until it is heard: an interrupt that arrives while a callback runs can be lost."""
    for _ in range(4):
        watcher.send_signal(signal.SIGINT)
        try:
            return str(watcher.communicate(timeout=15)[0])
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("the watcher did not leave")


def until(condition: Callable[[], object], limit: float = 90.0) -> None:
    """Wait for it, not for ever."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"waited {limit:.0f} s"
        time.sleep(0.01)
