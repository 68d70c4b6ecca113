"""Worker processes that stay: one pool per world size for the whole test run.

Starting ranks is the slow part of testing them. A pool starts them once; a test sends a module-level
function, every rank calls it with its mesh, and the results come back by rank.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import processes

LIMIT_S = 120.0


def live(rank: int, world: int, store_path: str, descriptor: int) -> None:
    """A rank's whole life: do what comes through the pipe until it is closed."""
    import torch
    import torch.distributed as dist

    from muster.hardware import rehearsal
    from muster.parallel import mesh as meshes
    from muster.parallel.layout import Layout

    pipe = Connection(descriptor)
    store = dist.FileStore(store_path, world)
    on_gpus = rehearsal.active() and torch.cuda.is_available()
    backend = "nccl" if on_gpus else "gloo"
    mesh = meshes.join(rank, rank, Layout(replicate=world), backend, LIMIT_S, store)
    assert ("cuda:nccl" in dist.get_backend_config()) == on_gpus
    while True:
        try:
            path, order = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            sys.path[:] = path  # test modules lie in folders that pytest added
            function, arguments = pickle.loads(order)
            answer = pickle.dumps((True, function(mesh, *arguments)))
        except BaseException as error:
            words = type(error).__name__, str(error), traceback.format_exc()
            answer = pickle.dumps((False, words))
        pipe.send_bytes(answer)  # not `send`, which would share tensors' memory


class RankError(AssertionError):
    """A function failed on a rank; carries the error's kind and words."""

    def __init__(self, rank: int, kind: str, message: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {trace}")
        self.rank, self.kind, self.message = rank, kind, message


class RankPool:
    def __init__(self, world: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes, self.closed = [], [], False
        for rank in range(world):
            here, there = Pipe()
            store = f"{self._folder.name}/store"
            program = f"import pool; pool.live({rank}, {world}, {store!r}, {there.fileno()})"
            command = [sys.executable, "-c", program]
            # What ranks print is shown with the test that runs them when it fails.
            streams = {"stdout": None, "errors": None, "pass_fds": [there.fileno()]}
            env = processes.python_path(Path(__file__).parent)
            self.processes.append(processes.start(command, env=env, **streams))
            there.close()
            self.pipes.append(here)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What every rank returns. The first rank to fail raises here."""
        order = pickle.dumps((sys.path, pickle.dumps((function, arguments))))
        for pipe in self.pipes:
            pipe.send_bytes(order)
        answers: dict[int, Any] = {}
        while len(answers) < len(self.pipes):
            open_pipes = [p for i, p in enumerate(self.pipes) if i not in answers]
            ready = wait(open_pipes, LIMIT_S)
            if not ready:
                self.close()  # a late answer must not be taken for the next one
                raise TimeoutError(
                    f"ranks {set(range(len(self.pipes))) - set(answers)} did not answer"
                )
            for pipe in ready:
                try:
                    answers[self.pipes.index(pipe)] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self.close()
                    raise RuntimeError(f"rank {self.pipes.index(pipe)} has died") from None
        for rank, (well, value) in sorted(answers.items()):
            if not well:
                raise RankError(rank, *value)
        return [answers[rank][1] for rank in range(len(self.pipes))]

    def close(self) -> None:
        self.closed = True
        for process in self.processes:
            process.kill()
            process.wait()
        for pipe in self.pipes:
            pipe.close()
        self._folder.cleanup()
