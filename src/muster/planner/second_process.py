"""A forked process that records beside this one: all that this one has imported and built is there."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from muster.hardware import cpus

LIMIT_S = 120.0  # for an answer; a recording takes seconds


class SecondProcess:
    """Calls `function` in another process. It is forked at the first call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.usable = cpus.find(Path("/")).usable > 1 and not torch.cuda.is_initialized()
        self._connection: Connection | None = None
        self._process: Any = None

    def call(self, *args: Any) -> Callable[[], Any]:
        """Begins; what it returns waits for the result. None where there is none, and then it is the caller's
        to compute."""
        if self.usable:
            self.usable = False  # until it has answered
            with contextlib.suppress(OSError):
                self._connection = self._connection or self._fork()
                self._connection.send(args)
                return self._answer
        return lambda: None

    def _fork(self) -> Connection:
        fork = multiprocessing.get_context("fork")
        mine, other = fork.Pipe()
        self._process = fork.Process(target=self._serve, args=(other, mine), daemon=True)
        self._process.start()
        other.close()
        return mine

    def _answer(self) -> Any:
        assert self._connection is not None
        with contextlib.suppress(EOFError, OSError):
            if self._connection.poll(LIMIT_S):
                answer = self._connection.recv()
                self.usable = answer is not None
                return answer
        self._process.kill()  # the first one does it all from now on
        return None

    def _serve(self, connection: Connection, other: Connection) -> None:
        other.close()  # so that this ends with the first process
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        warnings.simplefilter("ignore")  # the first process has them too, and its log
        logging.disable(logging.CRITICAL)
        torch.set_num_threads(1)  # a forked process cannot use the first one's
        with contextlib.suppress(EOFError, OSError):
            while True:
                args = connection.recv()
                try:
                    connection.send(self.function(*args))
                except Exception:
                    connection.send(None)
