"""Worker processes that stay: one pool per world size for the whole test run.

Starting ranks is the slow part of testing them. A pool starts them once; a test sends a module-level
function, every rank calls it with its mesh, and the results come back by rank.
"""

from __future__ import annotations

import multiprocessing as mp
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

LIMIT_S = 120.0


def _live(rank: int, world: int, store_path: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from muster.parallel import mesh as meshes
    from muster.parallel.layout import Layout

    torch.set_num_threads(1)
    store = dist.FileStore(store_path, world)
    mesh = meshes.join(rank, rank, Layout(replicate=world), "gloo", LIMIT_S, store)
    while True:
        order = pipe.recv()
        if order is None:
            return
        function, arguments = order
        try:
            pipe.send((True, function(mesh, *arguments)))
        except BaseException as error:
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))


class RankError(AssertionError):
    """A function failed on a rank; carries the error's kind and words."""

    def __init__(self, rank: int, kind: str, message: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {trace}")
        self.rank, self.kind, self.message = rank, kind, message


class RankPool:
    def __init__(self, world: int) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes, self.closed = [], [], False
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(
                target=_live, args=(rank, world, f"{self._folder.name}/store", there), daemon=True
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What every rank returns. The first rank to fail raises here."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
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
                answers[self.pipes.index(pipe)] = pipe.recv()
        for rank, (well, value) in sorted(answers.items()):
            if not well:
                raise RankError(rank, *value)
        return [answers[rank][1] for rank in range(len(self.pipes))]

    def close(self) -> None:
        self.closed = True
        for process in self.processes:
            process.kill()
        self._folder.cleanup()
