"""The control plane of a large run, simulated: every node and rank is a thread of one process, and all that
they talk to is muster's own: store, supervisors, collectors of heartbeats, stall detection, readers.

    python benchmarks/control_plane.py                          # 128 nodes of 8 ranks, beside 2 of 8
    python benchmarks/control_plane.py --nodes 8 --ranks 8

Counts, and times as ratios to the run on two nodes, which is measured first in the same process. File
operations are those on the run directory, which on a cluster is shared storage: what is opened, renamed,
removed, listed, and looked for. Messages are those between a client and the store.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from muster.hardware import rehearsal
from muster.launch import rendezvous
from muster.launch.cluster import Node, RankInfo
from muster.launch.nodes import HEARTBEAT_S, Nodes
from muster.launch.signed_store import SignedStore
from muster.observe.gather import Collector, Sender
from muster.observe.heartbeat import TICK_S, HeartbeatThread
from muster.observe.heartbeats import stall_file
from muster.observe.ranks import RankTable
from muster.observe.stall import StallLimit

SECRET = bytes(32)
TIMEOUT_S = 600.0
LONGEST_S = 540.0  # a rank may wait so long for others that are at work
LINE = {"step": 7, "compute_s": 0.2, "comm_wait_s": 0.1, "data_wait_s": 0.01, "memory_gib": 3.5}


class Files:
    """Operations on the files of a folder, by all threads or by one, while it counts."""

    def __init__(self) -> None:
        self.folder, self.thread = "", 0
        self.counts: Counter[str] = Counter()
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder and event in ("open", "os.rename", "os.remove", "os.scandir", "os.listdir"):
            self._count(arguments[0])

    def _count(self, path: object) -> None:
        if self.thread not in (0, threading.get_ident()):
            return
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.folder):
            self.counts[os.fspath(path)] += 1

    @contextmanager
    def counting(self, folder: Path, thread: int = 0) -> Iterator[Counter[str]]:
        looked_for, self.counts, self.thread = os.stat, Counter(), thread

        def stat(path: Any, *words: Any, **named: Any) -> os.stat_result:
            self._count(path)
            return looked_for(path, *words, **named)

        self.folder = str(folder)
        with mock.patch.object(os, "stat", stat):
            yield self.counts
        self.folder = ""


class Messages:
    """Calls of torch's store, under every SignedStore that is made while it counts."""

    NAMES = frozenset(("set", "get", "check", "multi_get", "compare_set", "wait"))

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        def get(store: SignedStore) -> Any:
            return Counted(store.__dict__["raw"], self)

        def put(store: SignedStore, raw: Any) -> None:
            store.__dict__["raw"] = raw

        with mock.patch.object(SignedStore, "raw", property(get, put), create=True):
            yield


class Counted:
    def __init__(self, raw: Any, messages: Messages) -> None:
        self._raw, self._messages = raw, messages

    def __getattr__(self, name: str) -> Any:
        if name in Messages.NAMES:
            self._messages.count += 1
        return getattr(self._raw, name)


class Rank(HeartbeatThread):
    """A rank's own heartbeat, which notes when the rank would exit as stalled."""

    exited: float | None = None

    def _exit_stalled(self, why: str) -> None:
        self.exited = time.monotonic()

    def wait_long(self) -> None:
        """As if it had made no progress for most of its limit: it looks whether others are at work."""
        self._watch._idle = 35.0
        self._watch._last = self.last

    def others(self) -> int:
        """Of which it knows what they do."""
        return len(self._watch._others._states)

    def close(self) -> None:
        self._sender.close()
        self._stacks.close()


class NodesRanks(threading.Thread):
    """The ranks of one node: a tick of each once a second."""

    def __init__(self, collector: Collector, numbers: Iterable[int], folder: Path) -> None:
        super().__init__(daemon=True)
        self.ranks: list[Rank] = []
        self.ended = threading.Event()
        for number in numbers:
            limit = StallLimit(LONGEST_S, adaptive=True)
            rank = Rank(folder / "ranks", number, limit, Sender(collector.address), "")
            rank.line, rank.last = LINE, ("forward and backward", 7, time.monotonic())
            (folder / "ranks" / f"{number}.jsonl").write_text(json.dumps(LINE) + "\n")
            self.ranks.append(rank)
        self.start()

    def run(self) -> None:
        left = self.ranks
        while left and not self.ended.wait(TICK_S):
            for rank in left:
                rank.tick()
            left = [rank for rank in left if rank.exited is None]


@dataclass
class Found:
    """Of one world. Seconds, to be compared with those of another world; else counts."""

    nodes: int
    ranks: int
    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)


def measure(nodes: int, per_node: int, folder: Path, files: Files, watch_s: float) -> Found:
    found = Found(nodes, nodes * per_node)
    (folder / "ranks").mkdir(parents=True)
    messages, before = Messages(), usage()
    watchdog = mock.patch.object(faulthandler, "dump_traceback_later")  # a process has only one
    with messages.counting(), watchdog:
        with timed(found, "until all nodes have joined"):
            supervisors = [Nodes(Node(0, nodes, rendezvous.LOOPBACK), TIMEOUT_S, 60.0, SECRET)]
            hosts = usage()
            port = supervisors[0].port
            together(lambda n: supervisors.append(_supervisor(n, nodes, port)), range(1, nodes))
            supervisors.sort(key=lambda one: one.node.rank)
            together(lambda one: one.join(), supervisors)
        found.counts["messages, a node, to join"] = messages.count / nodes
        messages.count = 0
        with timed(found, "until all ranks have registered"):
            stores: list[Any] = []
            together(
                lambda r: stores.append(_register(r, nodes, per_node, port)), range(found.ranks)
            )
        found.counts["messages, a rank, to register"] = messages.count / found.ranks
        heartbeats(found, folder, files, watch_s, messages, nodes, per_node)
        after = usage()
        clients = found.ranks + 2 * nodes - 1
        found.counts["threads of the store"] = hosts[0] - before[0] - 1
        found.counts["file handles, a client, both ends"] = (after[1] - before[1]) / clients
        found.counts["memory, a client, both ends, KiB"] = (after[2] - before[2]) / clients / 1024
        failure(found, supervisors, per_node)
        stores.clear()
        for one in reversed(supervisors):
            one.close()
    return found


def _supervisor(number: int, nodes: int, port: int) -> Nodes:
    return Nodes(Node(number, nodes, rendezvous.LOOPBACK, port), TIMEOUT_S, 60.0, SECRET)


def _register(rank: int, nodes: int, per_node: int, port: int) -> Any:
    info = RankInfo(
        rank, nodes * per_node, rank % per_node, per_node, rendezvous.LOOPBACK, port, agent=True
    )
    store = rendezvous.for_rank(info, TIMEOUT_S)
    rendezvous.register(store, info, None, TIMEOUT_S)
    return store


def heartbeats(
    found: Found,
    folder: Path,
    files: Files,
    watch_s: float,
    messages: Messages,
    nodes: int,
    per_node: int,
) -> None:
    """Of all ranks and nodes: as they train, as all of them wait long, as one is found stalled."""
    collectors = [Collector(folder, str(n)) for n in range(nodes)]
    ticking = [
        NodesRanks(collector, range(n * per_node, (n + 1) * per_node), folder)
        for n, collector in enumerate(collectors)
    ]
    ranks = [rank for one in ticking for rank in one.ranks]
    time.sleep(watch_s)
    messages.count = 0
    with files.counting(folder) as counts:
        time.sleep(watch_s)
    found.counts["messages a second, a node, while it trains"] = messages.count / watch_s / nodes
    found.counts["file operations a second, a node, while it trains"] = (
        counts.total() / watch_s / nodes
    )
    for rank in ranks:
        rank.wait_long()
    deadline = time.monotonic() + 300.0
    found.counts["ranks that know of all others, while all wait"] = sum(
        until(lambda rank=rank: rank.others() == found.ranks - 1, deadline) for rank in ranks
    )
    with files.counting(folder) as counts:
        time.sleep(watch_s)
    found.counts["file operations a second, a node, while all wait"] = (
        counts.total() / watch_s / nodes
    )
    table = RankTable(folder / "ranks")
    own = threading.get_ident()
    with files.counting(folder, own) as counts:
        began = time.thread_time()
        drawn = table.rows()
        found.seconds["CPU time to draw the table of ranks"] = time.thread_time() - began
    found.counts["ranks in a reader's table, with times"] = sum(
        row.times is not None for row in drawn
    )
    found.counts["file operations of a reader, a node"] = counts.total() / nodes
    began = time.monotonic()
    stall_file(folder / "ranks", "").touch()
    for one in ticking:
        one.join(60.0)
        one.ended.set()
    ended = [rank.exited for rank in ranks if rank.exited]
    found.counts["ranks that heard of the stall"] = len(ended)
    found.counts["heartbeats, until every rank knows of a stall"] = (
        max(ended, default=0.0) - began
    ) / TICK_S
    for rank in ranks:
        rank.close()
    for collector in collectors:
        collector.close()


def failure(found: Found, supervisors: list[Nodes], per_node: int) -> None:
    """Ranks of one node fail: all nodes hear of it, report, and get the decision."""
    began = time.monotonic()
    supervisors[-1].report_failure()
    deadline = began + 60.0
    told = [one for one in supervisors if until(one.peer_failed, deadline)]
    found.counts["nodes that heard of the failure"] = len(told)
    found.counts["heartbeats, until every node knows of a failure"] = (
        time.monotonic() - began
    ) / HEARTBEAT_S
    decisions: list[dict[str, Any]] = []

    def decide(one: Nodes) -> None:
        report = {"rank": one.node.rank * per_node, "what": "was killed"}
        decisions.append(one.decide(report, lambda reports: {"reports": len(reports)}))

    with timed(found, "until every node has the decision"):
        together(decide, supervisors)
    found.counts["nodes that have the decision"] = sum(
        decision == {"reports": found.nodes} for decision in decisions
    )


def together(call: Callable[[Any], object], items: Iterable[Any]) -> None:
    """In a thread for each; the first error of any is raised."""
    errors: list[BaseException] = []

    def guarded(item: Any) -> None:
        try:
            call(item)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(item,)) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@contextmanager
def timed(found: Found, what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    found.seconds[what] = time.monotonic() - began


def until(done: Callable[[], bool], deadline: float) -> bool:
    while not (reached := done()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return reached


def usage() -> tuple[int, int, int]:
    process = psutil.Process()
    return process.num_threads(), process.num_fds(), process.memory_info().rss


def lines_of(small: Found, large: Found) -> list[str]:
    heads = ("", f"{small.ranks} ranks", f"{large.ranks} ranks")
    rows = [
        heads,
        *((name, f"{small.counts[name]:.4g}", f"{n:.4g}") for name, n in large.counts.items()),
    ]
    rows += [(name, "1", f"{s / small.seconds[name]:.3g}") for name, s in large.seconds.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=8, help="of each node")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each count")
    asked = parser.parse_args()
    os.environ[rehearsal.VARIABLE] = "1"  # many nodes on one machine
    files = Files()
    with tempfile.TemporaryDirectory() as folder:
        small = measure(2, asked.ranks, Path(folder, "small"), files, asked.seconds)
        large = measure(asked.nodes, asked.ranks, Path(folder, "large"), files, asked.seconds)
    print("\n".join(lines_of(small, large)))


if __name__ == "__main__":
    main()
