"""Starting a check: on this machine's devices, or as the ranks that a launcher started."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from muster.check import rank as ranks
from muster.check.board import Board
from muster.check.findings import Finding, Report
from muster.check.judge import EndedFromOutsideError, Judge
from muster.check.seat import Options
from muster.errors import LaunchError
from muster.hardware import inventory
from muster.launch import cluster, rendezvous
from muster.launch.children import Children
from muster.launch.cluster import Node, Place
from muster.launch.join import is_rank


def check(options: Options, count: int | None = None, node: Node | None = None) -> Report | None:
    """As a rank where a launcher started this process, else with ranks of its own; `count` on this
    machine. None where another process has the report."""
    if is_rank():
        return check_as_rank(options, cluster.detect(os.environ))
    return check_machine(options, count or len(inventory.detect().gpus) or 2, node or Node())


def check_machine(options: Options, count: int, node: Node) -> Report | None:
    """Starts the ranks and outlives them. With several nodes, node 0 judges for all."""
    world = count * node.nodes
    try:
        store = rendezvous.for_node(node, options.timeout_s)
    except LaunchError as error:
        return _no_meeting(error, world)
    with (
        tempfile.TemporaryDirectory() as folder,
        Children(["muster.check.rank"], node, store.port, count, Path(folder)) as some,
    ):
        if node.rank:
            return _verdict(some, world)
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


def _no_meeting(error: LaunchError, world: int) -> Report:
    words, _, cure = str(error).partition("; ")
    cause = "ranks meet at one address and port, and nobody could listen or answer there"
    finding = Finding("ranks", "fail", words, cause, cure or "see the message")
    return Report([finding], world, [os.uname().nodename], 0.0)


def _verdict(children: Children, world: int) -> Report:
    """Where node 0 judges: what its ranks here were told, or why they were not."""
    while children.running:
        time.sleep(0.1)
    host, codes = os.uname().nodename, set(children.codes)
    if codes == {0}:
        finding = Finding("ranks", "ok", "node 0 finds this set-up fit; the table is there")
    elif codes == {1}:
        finding = Finding(
            "ranks",
            "fail",
            "node 0 finds this set-up not fit",
            cause="one of the steps failed, on this node or another",
            cure="see the table that node 0 prints",
        )
    else:
        words = "; ".join(f"rank {rank} {how}" for rank, how in children.exits().items())
        cause, cure = "node 0 or a rank here is gone", "see what node 0 says, and start again"
        finding = Finding("ranks", "fail", words, cause, cure, hosts=(host,))
    return Report([finding], world, [host], 0.0)
