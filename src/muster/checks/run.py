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

from muster.checks import rank as ranks
from muster.checks.context import Options
from muster.checks.findings import Finding, Report
from muster.checks.judge import Judge, TerminatedError
from muster.checks.messages import MessageStore
from muster.errors import LaunchError
from muster.hardware import inventory
from muster.launch import cluster, rendezvous
from muster.launch.children import Children
from muster.launch.cluster import Node, RankInfo
from muster.launch.join import is_rank
from muster.launch.secret import from_environment


def check(options: Options, count: int | None = None, node: Node | None = None) -> Report | None:
    """As a rank where a launcher started this process, else starts `count` ranks on this machine.
    Returns None where another process has the report."""
    if is_rank():
        return check_as_rank(options, cluster.detect(os.environ))
    return check_machine(
        options, inventory.detect().rank_count(count, cpu_ranks=2, share=True), node or Node()
    )


def check_machine(options: Options, count: int, node: Node) -> Report | None:
    """Starts the ranks and waits for them. With several nodes, node 0 judges for all."""
    world = count * node.nodes
    try:
        store = rendezvous.for_node(node, options.timeout_s)
    except LaunchError as error:
        return _no_rendezvous(error, world)
    with (
        tempfile.TemporaryDirectory() as folder,
        Children(["muster.checks.rank"], node, store.port, count, Path(folder)) as children,
    ):
        if node.rank:
            return _other_node(children, world)
        rank_info = cluster.detect(children.environments[0])  # the same store prefix as the ranks'
        secret = from_environment(children.environments[0])
        messages = MessageStore(rendezvous.for_rank(rank_info, options.timeout_s), secret)
        return Judge(messages, world, options, children.exits).run()


def check_as_rank(options: Options, rank_info: RankInfo) -> Report | None:
    """Rank 0 also judges, in its main thread; a second thread runs the steps and may block."""
    try:
        store = rendezvous.for_rank(rank_info, options.timeout_s)
    except LaunchError as error:
        return _no_rendezvous(error, rank_info.world)
    if rank_info.rank:
        ranks.serve(rank_info, store, options.timeout_s)
        return None

    def serve() -> None:
        reached = rendezvous.for_rank(replace(rank_info, agent=True), options.timeout_s)
        with suppress(LaunchError):  # the judge reports it
            ranks.serve(rank_info, reached, options.timeout_s)

    def terminate(number: int, frame: Any) -> None:
        raise TerminatedError

    signal.signal(signal.SIGTERM, terminate)
    threading.Thread(target=serve, daemon=True, name="rank 0").start()
    return Judge(MessageStore(store, from_environment()), rank_info.world, options).run()


def _no_rendezvous(error: LaunchError, world: int) -> Report:
    message, _, cure = str(error).partition("; ")
    cause = "no rendezvous: nothing could listen, or nothing answered, at MASTER_ADDR:MASTER_PORT"
    finding = Finding("ranks", "fail", message, cause, cure or "see the message")
    return Report([finding], world, [os.uname().nodename], 0.0)


def _other_node(children: Children, world: int) -> Report:
    """On other nodes than 0: the verdict by the exit codes of this node's ranks."""
    while children.running:
        time.sleep(0.1)
    host, codes = os.uname().nodename, set(children.codes)
    if codes == {0}:
        finding = Finding("ranks", "ok", "node 0 finds this setup fit; its table has the details")
    elif codes == {1}:
        finding = Finding(
            "ranks",
            "fail",
            "node 0 finds this setup not fit",
            cause="one of the steps failed, on this node or another",
            cure="see the table that node 0 prints",
        )
    else:
        message = "; ".join(f"rank {rank} {how}" for rank, how in children.exits().items())
        cause, cure = (
            "node 0 or a rank of this node has exited",
            "see the output of node 0, and start again",
        )
        finding = Finding("ranks", "fail", message, cause, cure, hosts=(host,))
    return Report([finding], world, [host], 0.0)
