"""Python programs that start in milliseconds: forked from a process that has imported torch already.

Starting Python, torch, FSDP and the rest takes seconds of a core, and the tests start hundreds of
ranks. `Server` imports them once. A program that it starts is a process of its own, with its own
arguments, variables, folder and streams; only what Python would have imported is there already. What
such a program starts in turn, `[sys.executable, "-m", "muster.worker", …]`, is forked from it in the
same way, so supervisors, torchrun's agents and their ranks remain parents and children.

Such programs share what a new interpreter would not: the seed of hashes, and what libraries read from
the environment while they are loaded. Tests use the server through `processes.py`, where `real=True`
starts a new interpreter.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import logging
import multiprocessing.process
import multiprocessing.util
import os
import pickle
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import psutil
import setproctitle

IMPORTS = (
    "muster.worker.main",
    "muster.cli",
    "muster.entrypoints.script",
    "muster.launch.agent",
    "torch.distributed.run",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch._inductor.config",
    "torch.utils.tensorboard",
    "deepspeed",
    "hydra",
    "jiwer",
    "pyarrow.parquet",
    "transformers.trainer",
    "transformers.models.whisper.english_normalizer",
    "transformers.models.gpt2.modeling_gpt2",
)
OWN = ("muster", "sitecustomize")  # what a program imports anew: its modules hold state
PYTHON_FLAGS = {"-u"}
# Options of Popen with which a program is left to Popen itself, unless they have these values.
USUAL = {"executable": None, "close_fds": True, "shell": False, "gid": None, "gids": None}
USUAL |= {"uid": None, "umask": -1, "process_group": -1}
PLAIN_POPEN: Any = subprocess.Popen


def popen_arguments(process: Any, *given: Any) -> dict[str, Any]:
    """What subprocess hands to the method that starts a process, by name."""
    return inspect.signature(PLAIN_POPEN._execute_child).bind(process, *given).arguments


def order_for(asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """What `become` is to do; None where no Python program of this environment is to be started."""
    env = dict(os.environ if asked["env"] is None else asked["env"])
    program = python_arguments(asked["args"], env)
    if program is None or any(asked.get(name, usual) != usual for name, usual in USUAL.items()):
        return None
    streams = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    return {
        "program": program,
        "env": env,
        "folder": os.path.abspath(asked["cwd"] or os.getcwd()),
        "descriptors": {fd: fd for fd in asked["pass_fds"]}
        | {i: i if fd == -1 else fd for i, fd in enumerate(streams)},
        "new_session": asked["start_new_session"],
        "unbuffered": "-u" in list(asked["args"])[1:2],
        "before": asked["preexec_fn"],
    }


def started(process: Any, asked: Mapping[str, Any]) -> None:
    """The parent's side of a start."""
    process._child_created = True
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    process._close_pipe_fds(*(asked[name] for name in pipes))


def python_arguments(command: Any, env: Mapping[str, str]) -> list[str] | None:
    """What Python would be given to run the command; None where another program, or a Python with
    flags of its own, is meant."""
    if isinstance(command, str | bytes) or not command:
        return None
    program, *rest = [os.fsdecode(word) for word in command]
    found = shutil.which(program, path=env.get("PATH", os.defpath))
    if found is None:
        return None
    if Path(found).parent != Path(sys.executable).parent:
        return None
    if Path(found).name.startswith("python"):
        while rest and rest[0] in PYTHON_FLAGS:
            rest = rest[1:]
        return rest if rest and (rest[0] in ("-m", "-c") or not rest[0].startswith("-")) else None
    with Path(found).open("rb") as file:
        shebang = file.readline().decode(errors="replace").strip()
    return [found, *rest] if shebang == f"#!{sys.executable}" else None


class ForkingPopen(PLAIN_POPEN):
    """A Popen that forks this process where a Python of this environment is to be started."""

    def _execute_child(self, *given: Any) -> None:
        asked = popen_arguments(self, *given)
        order = order_for(asked)
        if order is None:
            return super()._execute_child(*given)
        self.pid = os.fork()
        if self.pid == 0:
            become(**order, fresh=False)
        return started(self, asked)


def _spawn(path: Any, arguments: Sequence[Any], kept: Sequence[int]) -> int:
    """For multiprocessing, which gives a new interpreter the flags of this one, and `-c CODE`."""
    pid = os.fork()
    if pid == 0:
        words = [os.fsdecode(word) for word in arguments]
        descriptors = {fd: fd for fd in (0, 1, 2, *kept)}
        become(
            words[words.index("-c") :],
            dict(os.environ),
            os.getcwd(),
            descriptors,
            new_session=False,
            unbuffered=False,
            before=None,
            fresh=False,
        )
    return pid


def become(
    program: Sequence[str],
    env: Mapping[str, str],
    folder: str,
    descriptors: Mapping[int, int],
    new_session: bool,
    unbuffered: bool,
    before: Callable[[], object] | None,
    fresh: bool = True,
) -> NoReturn:
    """In a forked child: run the program as if it had just been started, and end.

    `descriptors` says which open file each number of the program's own stands for. `fresh`: nothing
    ran in this process before, so that modules of muster's hold no state but composed recipes.
    """
    code = 1
    try:
        _reset_signals()
        if new_session:
            os.setsid()
        _arrange(descriptors)
        os.chdir(folder)
        multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]
        older_path = _python_path()
        _older_streams.extend((sys.stdout, sys.stderr))
        os.environ.clear()
        os.environ.update(env)
        _open_streams(unbuffered)
        if before is not None:
            before()
        if not fresh:
            _forget()
        _set_threads()
        sys.orig_argv = [sys.executable, *program]
        setproctitle.setproctitle(" ".join(sys.orig_argv))  # what `ps` shows
        _set_path(program, older_path)
        subprocess.Popen = ForkingPopen  # type: ignore[misc]
        multiprocessing.util.spawnv_passfds = _spawn
        code = _run(program)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


_older_streams: list[
    Any
] = []  # kept: what a parent had not written yet is not this program's to write


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if number in (signal.SIGKILL, signal.SIGSTOP):
            continue
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _arrange(descriptors: Mapping[int, int]) -> None:
    """Each number stands for the file that it should, and every other file is closed."""
    high = 1 + max(*descriptors, *descriptors.values())
    moved = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, high) for number, fd in descriptors.items()}
    for number, fd in moved.items():
        os.dup2(fd, number, inheritable=True)
    keep = sorted(descriptors)
    for low, top in zip(keep, [*keep[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, min(top, 2**16))


def _open_streams(unbuffered: bool) -> None:
    plain = unbuffered or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, "utf-8", "backslashreplace", closefd=False)
    sys.stdout.reconfigure(write_through=plain, line_buffering=sys.stdout.isatty() or plain)


def _forget() -> None:
    """Modules and log handlers that a parent filled with state of its own."""
    for name in list(sys.modules):
        if name.partition(".")[0] in OWN:
            del sys.modules[name]
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    root.setLevel(logging.WARNING)
    logging.disable(logging.NOTSET)
    atexit._clear()  # a parent's temporary folder must not go when its child ends
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    for function in (logging.shutdown, multiprocessing.util._exit_function):
        atexit.register(function)


def _set_threads() -> None:
    """As many as torch takes when it is loaded."""
    torch: Any = sys.modules.get("torch")
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if torch is not None:
        torch.set_num_threads(int(asked) if asked.isdecimal() else len(os.sched_getaffinity(0)))


def _set_path(program: Sequence[str], before: str) -> None:
    """sys.path as Python makes it, with PYTHONPATH in place of what it was `before`; and what a
    sitecustomize there does."""
    given, older = ([p for p in text.split(os.pathsep) if p] for text in (_python_path(), before))
    script = program[0] if program[0] not in ("-m", "-c") else None
    first = str(Path(script).resolve().parent) if script else os.getcwd()
    rest = [p for p in sys.path[1:] if p not in (*older, *given)]
    sys.path[:] = [first, *given, *rest]
    importlib.invalidate_caches()
    if any(Path(place, "sitecustomize.py").is_file() for place in given):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")


def _python_path() -> str:
    return os.environ.get("PYTHONPATH", "")


def _run(arguments: Sequence[str]) -> int:
    """The exit code of `python ARGUMENTS`."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    first, *rest = arguments
    try:
        if first == "-m":
            sys.argv = ["-m", *rest[1:]]
            runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        elif first == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec", dont_inherit=True), main.__dict__)
        else:
            sys.argv = [first, *rest]
            main.__dict__.update(__file__=first, __cached__=None, __spec__=None)
            code = compile(Path(first).read_bytes(), first, "exec", dont_inherit=True)
            exec(code, main.__dict__)
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return (leaving.code or 0) & 0xFF
        print(leaving.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        inside = error.__traceback__ and error.__traceback__.tb_next  # without this function
        sys.excepthook(type(error), error.with_traceback(inside), inside)
        return 1
    return 0


class Server:
    """Forks a program for each connection, and answers with its process id and its exit status."""

    def __init__(self, address: str, owner: int) -> None:
        self.owner, self.clients = owner, {}
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address + ".new")
        self.listener.listen(64)
        os.rename(address + ".new", address)

    def serve(self) -> None:
        """Until the tests have ended; what they left running ends then too."""
        try:
            self._serve()
        finally:
            left = psutil.Process().children(recursive=True)
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def _serve(self) -> None:
        wake, told = socket.socketpair()
        wake.setblocking(False)
        told.setblocking(False)
        signal.set_wakeup_fd(told.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(self.listener, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        while self._owned():
            for key, _ in selector.select(1.0):
                if key.fileobj is self.listener:
                    client = self.listener.accept()[0]
                    try:
                        self._start(client)
                    except Exception:  # a client that is gone: the others still need the server
                        traceback.print_exc()
                        client.close()
                else:
                    wake.recv(4096)
            self._reap()

    def _owned(self) -> bool:
        try:
            os.kill(self.owner, 0)
        except ProcessLookupError:
            return False
        return True

    def _start(self, client: socket.socket) -> None:
        data, descriptors, _, _ = socket.recv_fds(client, 2**20, 64)
        size = int.from_bytes(data[:8], "little")
        if not data:
            client.close()  # it only asked whether the server is there
            return
        while len(data) < 8 + size:
            more = client.recv(2**20)
            if not more:
                raise EOFError("a client went away in the middle of its order")
            data += more
        asked = pickle.loads(data[8:])
        named = dict(zip(asked.pop("numbers"), descriptors, strict=True))
        pid = os.fork()
        if pid == 0:
            # What it is to call first may be defined in a module that only this program imports.
            before = pickle.loads(asked.pop("before"))
            become(**asked, before=before, descriptors=named)
        for fd in descriptors:
            os.close(fd)
        self.clients[pid] = client
        with suppress(OSError):
            client.send(pid.to_bytes(8, "little"))

    def _reap(self) -> None:
        while self.clients:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid not in self.clients:
                continue  # left behind by a program that has ended; see `main`
            with self.clients.pop(pid) as client, suppress(OSError):  # nobody may wait for it
                client.send(status.to_bytes(8, "little"))


def main(address: str, owner: str) -> None:
    for name in IMPORTS:
        importlib.import_module(name)
    recipes = importlib.import_module("muster.recipe.load")
    for name, _ in recipes.list_recipes():
        with suppress(recipes.RecipeError):  # of those that leave something to be given
            recipes.load(name)  # composed once, and kept
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    # `from subprocess import Popen`
    handler: Any = importlib.import_module(
        "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    )
    handler.Popen = ForkingPopen
    PR_SET_CHILD_SUBREAPER = 36  # what a program leaves behind, a detached run, is found at the end
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
    for option, value in ((M_TRIM_THRESHOLD, 2**30), (M_MMAP_THRESHOLD, 2**30), (M_ARENA_MAX, 2)):
        libc.mallopt(option, value)  # freed memory is kept for the next tensor: fewer page faults
    setproctitle.getproctitle()  # finds the place while the environment is as Python was given it
    gc.collect()
    gc.freeze()
    Server(address, int(owner)).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
