"""Starting a check: on this machine's devices, or as the ranks that a launcher started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from signal import Signals
from typing import Any, NoReturn

from muster.check import rank as ranks
from muster.check.board import Board
from muster.check.findings import Finding, Report
from muster.check.judge import EndedFromOutsideError, Judge
from muster.check.seat import Options
from muster.errors import LaunchError
from muster.hardware import inventory
from muster.launch import cluster, rendezvous
from muster.launch.cluster import Node, Place


def check(options: Options, count: int | None = None, node: Node | None = None) -> Report | None:
    """As a rank where a launcher started this process, else with ranks of its own; `count` on this
    machine. None where another process has the report."""
    if is_rank():
        return check_as_rank(options, cluster.detect(os.environ))
    return check_machine(options, count or len(inventory.detect().gpus) or 2, node or Node())


def is_rank() -> bool:
    """Whether a launcher started one process per rank, and this is one of them."""
    alone = cluster.detect(os.environ).launcher == "alone"
    return not alone and not cluster.slurm_launcher(os.environ)


def check_machine(options: Options, count: int, node: Node) -> Report | None:
    """Starts the ranks and outlives them. With several nodes, node 0 judges for all."""
    world = count * node.nodes
    try:
        store = rendezvous.for_node(node, options.timeout_s)
    except LaunchError as error:
        return _no_meeting(error, world)
    with (
        tempfile.TemporaryDirectory() as folder,
        _Children(node, store.port, count, folder) as some,
    ):
        if node.rank:
            return some.verdict(world)
        place = cluster.detect(some.environments[0])  # reads and writes where the ranks do
        board = Board(rendezvous.for_rank(place, options.timeout_s))
        return Judge(board, world, options, some.exits).conduct()


def check_as_rank(options: Options, place: Place) -> Report | None:
    """Rank 0 judges too: its first thread asks and can always speak, a second one is the rank."""
    try:
        store = rendezvous.for_rank(place, options.timeout_s)
    except LaunchError as error:
        return _no_meeting(error, place.world)
    if place.rank:
        ranks.serve(place, store, options.timeout_s)
        return None

    def serve() -> None:
        reached = rendezvous.for_rank(replace(place, agent=True), options.timeout_s)
        with suppress(LaunchError):  # the judge then knows more
            ranks.serve(place, reached, options.timeout_s)

    def go(number: int, frame: Any) -> None:
        raise EndedFromOutsideError

    signal.signal(signal.SIGTERM, go)
    threading.Thread(target=serve, daemon=True, name="rank 0").start()
    return Judge(Board(store), place.world, options).conduct()


def leave(code: int) -> NoReturn:
    """As one of a launcher's ranks: without tearing anything down, for a thread of this process, or
    another rank, may still sit in a collective."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _no_meeting(error: LaunchError, world: int) -> Report:
    words, _, cure = str(error).partition("; ")
    cause = "ranks meet at one address and port, and nobody could listen or answer there"
    finding = Finding("ranks", "fail", words, cause, cure or "see the message")
    return Report([finding], world, [os.uname().nodename], 0.0)


class _Children:
    """This machine's ranks, each with its words in a file."""

    def __init__(self, node: Node, port: int, count: int, folder: str) -> None:
        self.first, self.folder = node.rank * count, Path(folder)
        self.environments: list[dict[str, str]] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        for local in range(count):
            place = Place(self.first + local, count * node.nodes, local, count, node.address, port)
            env = {**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}
            cluster.export(place, env)
            self.environments.append(env)
            with (self.folder / str(local)).open("wb") as words:
                command = [sys.executable, "-m", "muster.check.rank"]
                self.processes.append(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=words, stderr=words, env=env
                    )
                )

    def __enter__(self) -> _Children:
        return self

    def __exit__(self, *problem: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def exits(self) -> dict[int, str]:
        """How ranks of this machine ended, in words, with the last of their own."""
        found = {}
        for local, process in enumerate(self.processes):
            code = process.poll()
            if code is not None:
                how = (
                    f"was killed by {Signals(-code).name}"
                    if code < 0
                    else f"ended with code {code}"
                )
                found[self.first + local] = how + self._last_words(local)
        return found

    def _last_words(self, local: int) -> str:
        text = (self.folder / str(local)).read_text(errors="replace").strip()
        return f", saying: {text.splitlines()[-1][:300]}" if text else ""

    def verdict(self, world: int) -> Report:
        """Where node 0 judges: what its ranks here were told, or why they were not."""
        while any(process.poll() is None for process in self.processes):
            time.sleep(0.1)
        host, codes = os.uname().nodename, [process.returncode for process in self.processes]
        if not any(codes):
            finding = Finding("ranks", "ok", "node 0 finds this set-up fit; the table is there")
        elif set(codes) == {1}:
            finding = Finding(
                "ranks",
                "fail",
                "node 0 finds this set-up not fit",
                cause="one of the steps failed, on this node or another",
                cure="see the table that node 0 prints",
            )
        else:
            words = "; ".join(f"rank {rank} {how}" for rank, how in self.exits().items())
            cause, cure = "node 0 or a rank here is gone", "see what node 0 says, and start again"
            finding = Finding("ranks", "fail", words, cause, cure, hosts=(host,))
        return Report([finding], world, [host], 0.0)
