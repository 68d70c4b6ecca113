"""Nodes of an elastic run: they come and go, and node 0 decides who takes part in the next attempt.

A machine signs in at node 0's store under the next free id. While its heartbeats arrive it is present.
For each attempt node 0 publishes the roster: the ids that take part, in the order of their node ranks,
and how many ranks each starts. A machine that is present and not in the roster waits for the next one.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

from muster.errors import LaunchError, RecipeError
from muster.launch.cluster import Node
from muster.launch.nodes import HEARTBEAT_S, SILENT_S, Nodes, RunEndedError
from muster.launch.signed_store import SignedStore

GATHER_S = 3.0  # at the start, for more nodes once the fewest have come
POLL_S = 0.05
CHECK_S = 1.0  # while it waits for other nodes
TWICE_S = 5.0  # a machine that still sends heartbeats so long after it has signed in again is two

Share = Callable[[Sequence[int]], list[int]]


class Node0LostError(Exception):
    """Node 0 has sent no heartbeat, or its store is gone."""


@dataclass(frozen=True)
class Member:
    """A machine that has signed in. `machine` stays the same when it comes back, `process` when its
    supervisor has only lost the connection. `ranks` is what it offers, or in a roster what it starts."""

    host: str
    address: str
    machine: str
    process: str
    ranks: int
    connection: str = field(default_factory=lambda: secrets.token_hex(8))


class ElasticNodes(Nodes):
    """`share` says how many ranks each node starts, of those that each offers, or raises a RecipeError.
    `on_growth` is called in a thread of node 0 with True while the next attempt would have more ranks than
    this one, or be without a machine that leaves; with False when that is over. `check` raises what is to end
    a wait for other nodes. With `leaving` set, this machine takes no part from the next attempt on."""

    def __init__(
        self,
        node: Node,
        timeout_s: float,
        stall_limit_s: float,
        *,
        ranks: int,
        share: Share,
        machine: str,
        process: str,
        on_growth: Callable[[bool], None] = lambda grows: None,
        check: Callable[[], None] = lambda: None,
        leaving: threading.Event | None = None,
        secret: bytes | None = None,
    ) -> None:
        self.asked, self.share, self.on_growth, self.check = node, share, on_growth, check
        self.me = Member(os.uname().nodename, _own_address(node.address), machine, process, ranks)
        self.known: dict[int, Member] = {}  # at node 0 everyone who has ever signed in, by id
        self.roster: dict[int, Member] = {}  # who takes part in this attempt, by id
        self.successor = self.me.address  # who is to be node 0 if node 0 is lost: on all the same
        self._first_seen: dict[int, float] = {}
        self._published = 0  # the newest attempt of node 0
        self._checked, self._leaving = 0.0, leaving or threading.Event()
        self._grows = threading.Event()
        self._looked: tuple[object, bool] = (None, False)  # at whom, and whether it would grow
        super().__init__(node, timeout_s, stall_limit_s, secret)
        if node.rank == 0 and node.nodes > 1:
            threading.Thread(target=self._tell_growth, daemon=True, name="growth").start()

    def _sign_in(self) -> None:
        text = json.dumps(asdict(self.me))
        for number in [0] if self.asked.rank == 0 else itertools.count(1):
            if self.store.compare_set(_signed_in(number), "", text).decode() == text:
                self.id = number
                break
        self.known[self.id] = self.me

    def offer(self, ranks: int, store: SignedStore | None = None) -> None:
        """This machine offers another number of ranks from the next attempt on."""
        self.me = self.known[self.id] = replace(self.me, ranks=ranks)
        (store or self.store).set(_signed_in(self.id), json.dumps(asdict(self.me)))

    @property
    def ranks(self) -> int:
        """That this node starts in this attempt."""
        return self.roster[self.id].ranks

    @property
    def world(self) -> int:
        return sum(member.ranks for member in self.roster.values())

    @property
    def first_rank(self) -> int:
        """Of this node's ranks."""
        return sum(self.roster[n].ranks for n in self.members[: self.node.rank])

    def join(self) -> None:
        """The next attempt: node 0 decides who takes part, the others wait until they do."""
        if self.asked.rank == 0:
            self._publish(self._gather())
        elif not self.query(self._await_roster):
            raise Node0LostError

    def _gather(self) -> dict[int, Member]:
        """The nodes of the next attempt, and what each offers now: more than the fewest if they come soon."""
        least, most = self.asked.least or 1, self.asked.nodes
        end, settled = time.monotonic() + self.timeout_s, 0.0
        while True:
            self._check()
            now, found = time.monotonic(), self.present()[:most]
            if len(found) >= least:
                settled = settled or now + (0.0 if self.attempt else GATHER_S)
                if len(found) == most or now >= settled:
                    chosen = self._offers(found)
                    if chosen and all(member.ranks for member in chosen.values()):
                        return chosen
            if now > end:
                raise self._end_by(self._too_few(len(found), least))
            time.sleep(POLL_S)

    def _check(self) -> None:
        """Now and then: it looks into the run directory."""
        if time.monotonic() >= self._checked + CHECK_S:
            self._checked = time.monotonic()
            self.check()

    def _offers(self, ids: Sequence[int]) -> dict[int, Member]:
        """As they are in the store: what the heartbeats have noted may be a second old, and a device have failed.
        None at all while one of them is written."""
        keys = {_signed_in(n): n for n in ids if n != self.id}
        there = self.store.present(list(keys))
        found = {keys[key]: _member(text) for key, text in there.items()}
        if len(found) < len(keys):
            return {}
        self.known.update(found)
        return {n: found.get(n, self.me) for n in ids}

    def _too_few(self, here: int, least: int) -> str:
        places = {self.known[n].machine for n in self.present()}
        gone = {
            member.machine: f"{member.host} (no heartbeat for {self.seconds_silent(n):.0f} s)"
            for n, member in sorted(self.known.items())
            if member.machine not in places
        }
        words = f"{here} of at least {least} nodes are at {self.asked.address}:{self.port}"
        if gone:
            words += f"; missing: {', '.join(gone.values())}"
        return f"{words}; none came within {self.timeout_s:.0f} s"

    def _end_by(self, words: str) -> LaunchError:
        self.end(words)
        return LaunchError(words)

    def _publish(self, chosen: dict[int, Member]) -> None:
        try:
            shares = self.share([member.ranks for member in chosen.values()])
        except RecipeError as error:
            raise self._end_by(str(error)) from None
        members = {
            n: replace(member, ranks=count)
            for (n, member), count in zip(chosen.items(), shares, strict=True)
        }
        roster = {n: member for n, member in members.items() if member.ranks}
        self._take(self.attempt + 1, roster)
        listed = [{"id": n, **asdict(member)} for n, member in roster.items()]
        self.store.set("roster", json.dumps({"attempt": self.attempt, "members": listed}))

    def _take(self, attempt: int, roster: dict[int, Member]) -> None:
        """The number of the attempt last: with it, a heartbeat tells of these members."""
        self.roster, self.members = roster, list(roster)
        self.hosts = {n: member.host for n, member in roster.items()}
        self.node = replace(self.asked, rank=self.members.index(self.id), nodes=len(roster))
        self._grows.clear()
        self.attempt = attempt

    def _await_roster(self) -> bool:
        while True:
            if self.store.check(["ended"]):
                raise RunEndedError(json.loads(self.store.get("ended")))
            if self.store.check([refused := f"refused/{self.id}"]):
                raise LaunchError(self.store.get(refused).decode())
            self._check()
            attempt, roster = _read_roster(self.store)
            if attempt > self.attempt and self.id in roster:
                self._take(attempt, roster)
                return True
            self._pause(POLL_S)

    def end(self, why: str | int) -> None:
        """Node 0, before it ends: those that wait for the next attempt end too, with this exit code or by
        this sentence."""
        self.store.set("ended", json.dumps(why))
        waiting = [n for n in list(self.known) if isinstance(why, str) or n not in self.roster]
        if any(n != self.id and not self._is_silent(n) for n in waiting):
            time.sleep(2 * HEARTBEAT_S)  # they read it before the store is gone

    def present(self) -> list[int]:
        """Ids of the machines that answer and offer ranks. Of a machine that has signed in again: the
        earlier id while heartbeats come from it, unless it is the same process."""
        holder: dict[str, int] = {}
        for number, member in sorted(self.known.items()):
            before = holder.get(member.machine)
            if before is None or not self._holds(before, number):
                holder[member.machine] = number
        return sorted(n for n in holder.values() if self.known[n].ranks and not self._is_silent(n))

    def _holds(self, before: int, number: int) -> bool:
        same = self.known[before].process == self.known[number].process
        return not same and not self._is_silent(before)

    def _is_silent(self, number: int) -> bool:
        limit = min(SILENT_S, self.stall_limit_s)
        return number != self.id and self.seconds_silent(number) > limit

    def silent_nodes(self) -> list[int]:
        """Nodes of this attempt that are lost, also because their machine has signed in again; the others
        observe node 0 only."""
        if self.asked.rank != 0:
            return [0] if self._is_silent(0) else []
        again = {self.known[n].machine: n for n in self.present()}
        return [
            n
            for n in self.members
            if n in self.known  # before the first attempt, none is
            and (self._is_silent(n) or again.get(self.known[n].machine, n) > n)
        ]

    def peer_failed(self) -> bool:
        """Also where node 0 goes on without this node, which it took for lost."""
        if self._published > self.attempt:
            self._failed_in = self.attempt
        return super().peer_failed()

    def _lost(self) -> list[int]:
        return self.silent_nodes()

    def _watch(self, store: SignedStore) -> None:
        attempt = self.attempt  # before its members are looked at
        if self.asked.rank != 0:
            if self._leaving.is_set() and self.me.ranks:
                self.offer(0, store)
            found = store.present(["roster", "successor"])
            if "roster" in found:
                self._published = json.loads(found["roster"])["attempt"]
            self.successor = found.get("successor", self.me.address.encode()).decode()
            return
        self._look_around(store)
        if silent := self.silent_nodes():
            self._note_silence(attempt, silent[0])
            store.set(self._key("failed", attempt=attempt), str(self.id))  # the others end theirs
        elif self.roster:
            self._note_growth(attempt)
        self._name_successor(store)

    def _note_growth(self, attempt: int) -> None:
        if not self._would_grow():
            self._grows.clear()
        elif attempt == self.attempt:
            self._grows.set()

    def _tell_growth(self) -> None:
        """In a thread of its own: storage that does not answer must not hold up the heartbeats."""
        told = False
        while not self._closing.wait(HEARTBEAT_S):
            grows = self._grows.is_set()
            if grows or told:
                self.on_growth(grows)
            told = grows

    def _name_successor(self, store: SignedStore) -> None:
        """Whom all take for the next node 0: one that trains, or else one that waits."""
        others = sorted((n not in self.roster, n) for n in self.present() if n)
        if others and (address := self.known[others[0][1]].address) != self.successor:
            self.successor = address
            store.set("successor", address)

    def _look_around(self, store: SignedStore) -> None:
        """Node 0: who has signed in, who offers another number of ranks, who has signed in twice."""
        number = 1
        while store.check([_signed_in(number)]):
            if number not in self.known:
                self._first_seen[number] = time.monotonic()
                self._last_seen[number] = (b"", time.monotonic())
            self.known[number] = _member(store.get(_signed_in(number)))
            number += 1
        present = {self.known[n].machine: n for n in self.present()}
        for number, member in self.known.items():
            holder = present.get(member.machine, number)
            seen = time.monotonic() if holder == self.id else self._last_seen[holder][1]
            if holder < number and seen > self._first_seen[number] + TWICE_S:
                words = f"{member.host} has joined already, by another process; end that one first"
                store.set(f"refused/{number}", words)

    def _would_grow(self) -> bool:
        """Or be without a machine that leaves: the ranks end after their next checkpoint."""
        if any(not self.known[n].ranks for n in self.members):
            return True
        ids = self.present()[: self.asked.nodes]
        now = (self.attempt, [(n, self.known[n].ranks) for n in ids])
        if now != self._looked[0]:
            self._looked = now, self._has_more([self.known[n].ranks for n in ids])
        return self._looked[1]

    def _has_more(self, offers: Sequence[int]) -> bool:
        with suppress(RecipeError):
            return sum(self.share(offers)) > self.world
        return False


def _read_roster(store: SignedStore) -> tuple[int, dict[int, Member]]:
    """The newest attempt of node 0, and who takes part."""
    if not store.check(["roster"]):
        return 0, {}
    found = json.loads(store.get("roster"))
    return found["attempt"], {m.pop("id"): Member(**m) for m in found["members"]}


def _member(text: bytes) -> Member:
    return Member(**json.loads(text))


def _signed_in(number: int) -> str:
    return f"signed-in/{number}"


def _own_address(master: str) -> str:
    """The address of this machine that node 0 sees."""
    with suppress(OSError):
        family, kind, _, _, where = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # a datagram socket sends nothing yet
            return str(probe.getsockname()[0])
    return master
