"""The supervisors of all nodes: who is there, who fell silent, and what happens next.

Node 0 decides. The others tell it how their ranks fared and wait for its verdict, so that all of
them restart together or end together. With one node, the same code talks to itself.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
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

log = logging.getLogger(__name__)

PULSE_S = 1.0
SILENT_S = 30.0  # a node unheard of for so long is not waited for any longer


Account = dict[str, Any] | None
Answer = TypeVar("Answer")


class DismissedError(Exception):
    """Another node's ranks failed, so this node's were ended too."""


class Nodes:
    def __init__(self, node: Node, timeout_s: float, patience_s: float) -> None:
        """`timeout_s` limits the first meeting; a node silent for `patience_s` ends the run."""
        self.node, self.timeout_s, self.patience_s = node, timeout_s, patience_s
        self.store = rendezvous.for_node(node, timeout_s)
        self.port = int(self.store.port)
        self.attempt = 0
        others = range(1, node.nodes) if node.rank == 0 else range(1)
        self._heard = {n: (b"", time.monotonic()) for n in others}
        self._token = secrets.token_hex(8)
        self._failed_in = 0  # the attempt in which another node's ranks failed
        self._closing = threading.Event()
        self._pulsing = threading.Thread(target=self._pulse, daemon=True, name="nodes")
        if node.nodes > 1:
            self._pulsing.start()

    def close(self) -> None:
        """A thread that still talks to the store when Python ends would abort the process."""
        self._closing.set()
        if self._pulsing.is_alive():
            self._pulsing.join(2 * PULSE_S)

    def publish(self, **facts: Any) -> None:
        """Node 0 says what the run is, to those who ask for the key `run`."""
        self.store.set("run", json.dumps(facts))

    def arrive(self) -> None:
        """Wait until every node has come to the next attempt."""
        self.attempt += 1
        if not self._ask(self._gather):
            raise LaunchError(
                f"node 0 at {self.node.address} has not been heard of for {self.silence(0):.0f} s; "
                "bring it back, then start again on every node"
            )
        now = time.monotonic()  # whoever came late was not silent
        self._heard = {n: (said, now) for n, (said, _) in self._heard.items()}

    def _gather(self) -> bool:
        me = f"{os.uname().nodename} {self._token}"
        here = self._key("here", self.node.rank)
        if (other := self.store.compare_set(here, "", me).decode()) != me:
            raise LaunchError(
                f"{other.split()[0]} has come as node {self.node.rank} already; give every machine "
                "a --node-rank of its own"
            )
        end = time.monotonic() + self.timeout_s
        missing = list(range(self.node.nodes))
        while missing := [n for n in missing if not self.store.check([self._key("here", n)])]:
            if self.store.check(["refused"]):
                raise LaunchError(self.store.get("refused").decode())
            if time.monotonic() > end:
                names = ", ".join(str(n) for n in missing[:8])
                raise LaunchError(
                    f"of {self.node.nodes} nodes, node {names} did not come to {self.node.address}:"
                    f"{self.port} within {self.timeout_s:.0f} s; start it with the same --nodes, "
                    "--master-addr and --master-port, or raise distributed.timeout_s"
                )
            time.sleep(0.05)
        said = [self.store.get(self._key("here", n)).decode() for n in range(self.node.nodes)]
        self.hosts = [words.split()[0] for words in said]
        return True

    def _key(self, what: str, node: int | str = "") -> str:
        return f"{self.attempt}/{what}/{node}"

    def report_failure(self) -> None:
        """This node's ranks have failed: the others end theirs."""
        with suppress(RuntimeError):  # node 0 is gone, as `decide` will find
            self.store.set(self._key("failed"), str(self.node.rank))

    def dismissed(self) -> bool:
        """Whether this node's ranks train in vain: others failed, or a node fell silent."""
        return self._failed_in == self.attempt or bool(self.silent(self.patience_s))

    def silent(self, longer_than: float | None = None) -> list[int]:
        """Nodes that node 0 has not heard of for so long; elsewhere, node 0 alone may be silent."""
        if self.node.nodes == 1:
            return []
        limit = min(SILENT_S, self.patience_s) if longer_than is None else longer_than
        return sorted(n for n in self._heard if self.silence(n) > limit)

    def silence(self, node: int) -> float:
        """Seconds since a node was last heard of."""
        return time.monotonic() - self._heard[node][1]

    def decide(
        self, mine: Account, judge: Callable[[list[Account]], dict[str, Any]]
    ) -> dict[str, Any]:
        """Tell how this node's ranks fared, None for well, and hear what node 0 makes of it all."""
        if self.node.rank == 0:
            self.store.set(self._key("account", 0), json.dumps(mine))
            verdict = judge([self._account(n) for n in range(self.node.nodes)])
            self.store.set(self._key("verdict"), json.dumps(verdict))
            self._last_words()
            return verdict
        return self._ask(lambda: self._verdict(mine)) or judge([mine, {"silent": 0}])

    def _ask(self, question: Callable[[], Answer]) -> Answer | None:
        """What the store answers; None when node 0 falls silent, for then it may never do so."""
        if self.node.rank == 0:
            return question()
        answers: list[Answer] = []
        problems: list[Exception] = []

        def ask() -> None:
            try:
                answers.append(question())
            except Exception as problem:
                problems.append(problem)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        while asking.is_alive() and not self.silent():
            asking.join(0.1)
        if problems and isinstance(problems[0], LaunchError):
            raise problems[0]
        return answers[0] if answers else None

    def _verdict(self, mine: Account) -> dict[str, Any]:
        self.store.set(self._key("account", self.node.rank), json.dumps(mine))
        while not self.store.check([self._key("verdict")]):
            time.sleep(0.05)
        verdict: dict[str, Any] = json.loads(self.store.get(self._key("verdict")))
        self.store.set(self._key("read", self.node.rank), "")
        return verdict

    def _account(self, node: int) -> Account:
        """What a node says of its ranks, however long they take, unless it falls silent."""
        while not self.store.check([self._key("account", node)]):
            if node in self.silent():
                return {"silent": node}
            time.sleep(0.05)
        account: Account = json.loads(self.store.get(self._key("account", node)))
        return account

    def _last_words(self) -> None:
        """Node 0 takes the store with it when it leaves: not before the others have read."""
        for n in range(1, self.node.nodes):
            while not self.store.check([self._key("read", n)]) and n not in self.silent():
                time.sleep(0.05)

    def _pulse(self) -> None:
        """On a connection of its own: one that waits for a dead machine holds up no other."""
        try:
            store = rendezvous.reach(self.node.address, self.port, self.timeout_s)
            while not self._closing.wait(PULSE_S):
                store.set(f"pulse/{self.node.rank}", str(time.time()))
                for n, (before, _) in self._heard.items():
                    key = f"pulse/{n}"
                    said = store.get(key) if store.check([key]) else b""
                    if said != before:
                        self._heard[n] = (said, time.monotonic())
                attempt, failed = self.attempt, self._key("failed")
                if store.check([failed]):
                    self._failed_in = attempt
        except Exception as error:  # node 0 is gone: its silence grows from here on
            log.info("the other nodes are out of reach: %s", error)


class Meeting(RendezvousHandler):
    """How torch's agent finds the other agents: they are there already."""

    def __init__(self, nodes: Nodes, run_id: str) -> None:
        self.nodes, self.run_id = nodes, run_id

    def get_backend(self) -> str:
        return "muster"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if self.nodes.dismissed():
            raise DismissedError
        node = self.nodes.node
        store = dist.PrefixStore(f"agents/{self.run_id}", self.nodes.store)  # type: ignore[attr-defined]
        where = RendezvousStoreInfo(node.address, self.nodes.port)
        return RendezvousInfo(store, node.rank, node.nodes, where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        """Above 0, the agent ends its ranks and comes to `next_rendezvous`."""
        return int(self.nodes.dismissed())

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        return True
