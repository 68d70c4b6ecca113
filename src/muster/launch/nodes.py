"""Rendezvous, heartbeats and restart decisions of the supervisors of all nodes.

Node 0 decides. The others send it a report of their ranks and wait for its decision, so that all
nodes restart together or end together. With one node, the same code runs on one store.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from muster.errors import LaunchError
from muster.launch import rendezvous
from muster.launch.cluster import Node
from muster.launch.signed_store import SignedStore

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
POLL_S, MOST_POLL_S = 0.05, 0.25
SILENT_S = 30.0  # without a heartbeat: then a node is not waited for any longer


LOST = (LaunchError, dist.DistError)  # of a connection

NodeReport = dict[str, Any] | None
Result = TypeVar("Result")


class PeerFailedError(Exception):
    """Another node failed, so this node's ranks were ended too."""


class RunEndedError(Exception):
    """The run ended while this node waited to take part: `why` is a sentence, or the exit code."""

    def __init__(self, why: str | int) -> None:
        super().__init__(why)
        self.why = why


class Nodes:
    def __init__(
        self, node: Node, timeout_s: float, stall_limit_s: float, secret: bytes | None = None
    ) -> None:
        """`timeout_s` limits the rendezvous; a node without heartbeat for `stall_limit_s` ends the run.
        Other nodes are believed what is signed with the run's `secret`."""
        self.node, self.timeout_s, self.stall_limit_s = node, timeout_s, stall_limit_s
        self.store = SignedStore(rendezvous.for_supervisor(node, timeout_s), secret)
        self.port = int(self.store.port)
        self.attempt = 0
        self.id = node.rank  # by which the store's keys name this node
        self.members = list(range(node.nodes))  # ids, in the order of their node ranks
        self.hosts: dict[int, str] = {}  # by id
        others = range(1, node.nodes) if node.rank == 0 else range(1)
        self._last_seen = {n: (b"", time.monotonic()) for n in others}
        self._token = secrets.token_hex(8)
        self._told = ""  # the latest problem of a heartbeat
        self._given_up = False
        self._failed_in = 0  # the attempt in which another node's ranks failed
        self._silence: tuple[int, dict[str, Any]] = (0, {})  # the attempt, and who was silent in it
        self._closing = threading.Event()
        self._heartbeats = threading.Thread(target=self._send_heartbeats, daemon=True, name="nodes")
        self._sign_in()
        if node.nodes > 1:
            self._heartbeats.start()

    def _sign_in(self) -> None:
        """Before the first heartbeat: nothing, where every node's rank is given."""

    def close(self) -> None:
        """A thread that still uses the store when Python ends would abort the process."""
        self._closing.set()
        if self._heartbeats.is_alive():
            self._heartbeats.join(2 * HEARTBEAT_S)

    def publish(self, **facts: Any) -> None:
        """Node 0 writes what the run is to the key `run`, which other nodes read."""
        self.store.set("run", json.dumps(facts))

    def join(self) -> None:
        """Rendezvous of all nodes for the next attempt."""
        self.attempt += 1
        if not self.query(self._join):
            raise LaunchError(
                f"node 0 at {self.node.address} has sent no heartbeat for {self.seconds_silent(0):.0f} s; "
                "bring it back, then start again on every node"
            )
        now = time.monotonic()  # a node that joined late is not lost
        self._last_seen = {n: (value, now) for n, (value, _) in self._last_seen.items()}

    def _join(self) -> bool:
        me = f"{os.uname().nodename} {self._token}"
        key = self._key("joined", self.node.rank)
        if (other := self.store.compare_set(key, "", me).decode()) != me:
            raise LaunchError(
                f"{other.split()[0]} has already joined as node {self.node.rank}; give every "
                "machine its own --node-rank"
            )
        everyone = [self._key("joined", n) for n in range(self.node.nodes)]
        listed, start = self._key("hosts"), time.monotonic()
        while not self.store.check([listed]):
            if self.node.rank == 0 and self.store.check(everyone):
                names = [value.decode().split()[0] for value in self.store.multi_get(everyone)]
                self.store.set(listed, json.dumps(names))  # from here the others have them
                break
            if self.store.check(["refused"]):
                raise LaunchError(self.store.get("refused").decode())
            if (waited := time.monotonic() - start) > self.timeout_s:
                raise LaunchError(self._missing(everyone))
            time.sleep(min(MOST_POLL_S, POLL_S + waited / 40))
        self.hosts = dict(enumerate(json.loads(self.store.get(listed))))
        return True

    def _missing(self, everyone: list[str]) -> str:
        came = self.store.present(everyone)
        numbers = [str(n) for n, key in enumerate(everyone) if key not in came]
        names = ", ".join(numbers[:8]) or "0"
        return (
            f"of {self.node.nodes} nodes, node {names} did not join at {self.node.address}:"
            f"{self.port} within {self.timeout_s:.0f} s; start it with the same --nodes, "
            "--master-addr and --master-port, or raise distributed.timeout_s"
        )

    def _key(self, what: str, node: int | str = "", attempt: int | None = None) -> str:
        return f"{self.attempt if attempt is None else attempt}/{what}/{node}"

    def report_failure(self) -> None:
        """This node's ranks have failed: the others end theirs."""
        with suppress(RuntimeError):  # node 0 is lost, which `decide` detects
            self.store.set(self._key("failed"), str(self.id))

    def peer_failed(self) -> bool:
        """Whether ranks of another node failed, or a node is lost: then this node's ranks are ended. It stays so in
        this attempt, also where the lost node is heard again: others may have ended their ranks."""
        if silent := self._lost():
            self._note_silence(self.attempt, silent[0])
        return self._given_up or self._failed_in == self.attempt

    def give_up(self) -> None:
        """This node's ranks end, now and in every attempt: the run is another's."""
        self._given_up = True

    def _lost(self) -> list[int]:
        """Nodes for whose silence ranks are ended."""
        return self._silent_for(self.stall_limit_s)

    def _note_silence(self, attempt: int, node: int) -> None:
        self._failed_in = max(attempt, self._failed_in)
        if self._silence[0] < attempt:
            self._silence = attempt, {"silent": node, "seconds": self.seconds_silent(node)}

    def silence(self) -> NodeReport:
        """The report of a node whose ranks were ended in this attempt because it did not hear another one."""
        attempt, report = self._silence
        return report if attempt == self.attempt else None

    def silent_nodes(self) -> list[int]:
        """Nodes that are not waited for. Only node 0 observes all; the others observe node 0."""
        return self._silent_for(min(SILENT_S, self.stall_limit_s))

    def _silent_for(self, seconds: float) -> list[int]:
        if self.node.nodes == 1:
            return []
        return sorted(n for n in self._last_seen if self.seconds_silent(n) > seconds)

    def seconds_silent(self, node: int) -> float:
        """Seconds since a node's last heartbeat."""
        return time.monotonic() - self._last_seen[node][1]

    def decide(
        self, report: NodeReport, judge: Callable[[list[NodeReport]], dict[str, Any]]
    ) -> dict[str, Any]:
        """Send the report of this node's ranks, None for success, and return node 0's decision."""
        if self.node.rank == 0:
            self.store.set(self._key("report", 0), json.dumps(report))
            decision = judge([self._report(n) for n in self.members])
            self.store.set(self._key("decision"), json.dumps(decision))
            self._wait_until_read()
            return decision
        return self.query(lambda: self._decision(report)) or judge([report, {"silent": 0}])

    def query(self, call: Callable[[], Result]) -> Result | None:
        """The result of a call on the store; None when node 0 is lost, since it may then never return."""
        if self.node.rank == 0:
            return call()
        results: list[Result] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                results.append(call())
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while thread.is_alive() and not self.silent_nodes():
            thread.join(0.1)
        if errors and isinstance(errors[0], (LaunchError, RunEndedError)):
            raise errors[0]
        return results[0] if results else None

    def _pause(self, seconds: float) -> None:
        """In a thread that waits for node 0, and is left behind when this node gives it up."""
        if self._closing.wait(seconds):
            raise LaunchError("the connection to node 0 has been closed")

    def _decision(self, report: NodeReport) -> dict[str, Any]:
        self.store.set(self._key("report", self.id), json.dumps(report))
        while not self.store.check([self._key("decision")]):
            self._pause(0.05)
        decision: dict[str, Any] = json.loads(self.store.get(self._key("decision")))
        self.store.set(self._key("read", self.id), "")
        return decision

    def _report(self, node: int) -> NodeReport:
        """A node's report, however long its ranks take, unless the node is lost."""
        while not self.store.check([self._key("report", node)]):
            if node in self.silent_nodes():
                return {"silent": node}
            time.sleep(0.05)
        report: NodeReport = json.loads(self.store.get(self._key("report", node)))
        return report

    def _wait_until_read(self) -> None:
        """Node 0 hosts the store, and so exits only after the others have read the decision."""
        for n in self.members[1:]:
            while not self.store.check([self._key("read", n)]) and n not in self.silent_nodes():
                time.sleep(0.05)

    def _send_heartbeats(self) -> None:
        """On its own connection: a call that waits for a lost machine blocks no other."""
        try:
            store = self.store.over(
                rendezvous.connect(self.node.address, self.port, self.timeout_s)
            )
            while not self._closing.wait(HEARTBEAT_S):
                self._beat(store)
        except LOST as error:  # node 0: it counts as silent from here on
            log.info("lost the connection to the other nodes: %s", error)

    def _beat(self, store: SignedStore) -> None:
        """One heartbeat, and what the others have sent. A message that cannot be read, or is removed while
        it is read, must not end the heartbeats: this node would be taken for lost."""
        try:
            store.set(f"heartbeat/{self.id}", str(time.time()))
            store.write_again()
            attempt = self.attempt
            failed = self._key("failed", attempt=attempt)
            others = {f"heartbeat/{n}": n for n in self._last_seen}
            found = store.present([*others, failed])
            for key, n in others.items():
                if key in found and found[key] != self._last_seen[n][0]:
                    self._last_seen[n] = (found[key], time.monotonic())
            if failed in found:
                self._failed_in = max(attempt, self._failed_in)
            self._watch(store)
        except LOST:
            raise
        except Exception as error:
            if str(error) != self._told:
                self._told = str(error)
                log.warning("a message of the other nodes cannot be used: %s", error)

    def _watch(self, store: SignedStore) -> None:
        """After each heartbeat, in its thread and on its connection."""


class AgentStore:
    """What torch's agents tell each other, such as how many ranks each has, signed as all else is."""

    def __init__(self, nodes: Nodes, prefix: str) -> None:
        self._nodes, self._store, self._prefix = nodes, nodes.store, prefix

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(self._prefix + key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """What other agents have written. A node that is lost before it has ends this attempt."""
        names = [self._prefix + key for key in keys]
        found = self._nodes.query(lambda: self._await(names))
        if found is None:
            raise PeerFailedError
        return found

    def _await(self, names: Sequence[str]) -> list[bytes] | None:
        nodes, end = self._nodes, time.monotonic() + self._nodes.timeout_s
        while not self._store.check(names):
            if nodes.peer_failed():
                return None
            if time.monotonic() > end:
                raise LaunchError(
                    f"nodes sent heartbeats, but started no ranks within {nodes.timeout_s:.0f} s; see "
                    "launcher-*.log in the run directory for why"
                )
            time.sleep(POLL_S)
        return self._store.multi_get(names)


class NodeRendezvous(RendezvousHandler):
    """Rendezvous handler for torch's agent; `Nodes.join` has already done the rendezvous."""

    def __init__(self, nodes: Nodes, run_id: str) -> None:
        self.nodes, self.run_id = nodes, run_id

    def get_backend(self) -> str:
        return "muster"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if self.nodes.peer_failed():
            raise PeerFailedError
        node = self.nodes.node
        store: Any = AgentStore(self.nodes, f"{self.nodes.attempt}/agents/")
        where = RendezvousStoreInfo(node.address, self.nodes.port)
        return RendezvousInfo(store, node.rank, node.nodes, where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        """Above 0, the agent ends its ranks and calls `next_rendezvous`."""
        return int(self.nodes.peer_failed())

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        return True
