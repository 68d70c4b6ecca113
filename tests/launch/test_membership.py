"""Nodes of an elastic run that come, fall silent, come back and come twice. All of them in one process."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from muster.errors import LaunchError, RecipeError
from muster.launch import addresses, membership
from muster.launch.cluster import Node
from muster.launch.membership import ElasticNodes, Node0LostError
from muster.launch.nodes import NodeRendezvous, PeerFailedError, RunEndedError
from processes import until

OUTSIDE = [a for a in addresses.own_addresses() if not ipaddress.ip_address(a).is_loopback]
SILENT_S = 1.6

pytestmark = pytest.mark.skipif(not OUTSIDE, reason="needs an address besides the loopback")


class Machine:
    """A supervisor's membership; `attempts` are the rosters it has taken part in."""

    def __init__(self, nodes: ElasticNodes) -> None:
        self.nodes, self.attempts = nodes, list[list[str]]()
        self.error: Exception | None = None
        self.thread: threading.Thread | None = None

    def join(self) -> Machine:
        def run() -> None:
            try:
                self.nodes.join()
                roster = self.nodes.roster.values()
                self.attempts.append([f"{m.machine}:{m.ranks}" for m in roster])
            except Exception as error:
                self.error = error

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        return self

    def joined(self) -> list[str]:
        assert self.thread is not None
        self.thread.join(20)
        assert not self.thread.is_alive()
        if self.error:
            raise self.error
        return self.attempts[-1]

    def fall_silent(self) -> None:
        self.nodes._closing.set()


def all_of_them(offers: Sequence[int]) -> list[int]:
    return list(offers)


@pytest.fixture
def machine(monkeypatch) -> Iterator[Callable[..., Machine]]:
    monkeypatch.setattr(membership, "HEARTBEAT_S", 0.1)
    from muster.launch import nodes as nodes_module

    monkeypatch.setattr(nodes_module, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(membership, "GATHER_S", 0.5)
    monkeypatch.setattr(membership, "TWICE_S", 0.5)
    made: list[Machine] = []

    def make(name: str, rank: int = 1, spread: tuple[int, int] = (1, 4), **options: Any) -> Machine:
        least, most = spread
        port = made[0].nodes.port if made else 0
        given = {"ranks": 2, "share": all_of_them, "machine": name, "process": f"{name}-1"}
        node = Node(rank, most, OUTSIDE[0], port, least)
        limit = options.pop("timeout_s", 20.0)
        made.append(Machine(ElasticNodes(node, limit, SILENT_S, **{**given, **options})))
        return made[-1]

    yield make
    for one in reversed(made):
        one.nodes.close()


def test_a_run_starts_with_the_fewest_and_takes_more_that_come_soon(machine):
    a = machine("a", 0, (2, 4)).join()
    b = machine("b").join()
    c = machine("c").join()
    assert a.joined() == b.joined() == c.joined() == ["a:2", "b:2", "c:2"]
    assert [one.nodes.node.rank for one in (a, b, c)] == [0, 1, 2]
    assert [one.nodes.first_rank for one in (a, b, c)] == [0, 2, 4]


def test_the_rest_go_on_without_a_lost_node_and_take_it_in_when_it_comes_back(machine):
    grows = threading.Event()
    a = machine("a", 0, (1, 2), on_growth=lambda more: grows.set() if more else None).join()
    b = machine("b").join()
    assert a.joined() == b.joined() == ["a:2", "b:2"]
    assert not a.nodes.peer_failed()
    b.fall_silent()
    until(a.nodes.peer_failed, 10)
    decision = a.nodes.decide(None, lambda reports: {"again": reports == [None, {"silent": 1}]})
    assert decision == {"again": True}
    assert a.join().joined() == ["a:2"]
    assert not a.nodes.peer_failed()
    assert not grows.is_set()
    b = machine("b", process="b-2").join()
    until(grows.is_set, 10)
    assert a.join().joined() == b.joined() == ["a:2", "b:2"]


def test_a_node_that_was_taken_for_lost_ends_its_ranks_and_waits(machine):
    a = machine("a", 0, (1, 2)).join()
    b = machine("b").join()
    a.joined(), b.joined()
    b.nodes.offer(0)  # just now: no heartbeat of a's has noted it
    assert a.join().joined() == ["a:2"]
    until(b.nodes.peer_failed, 10)


def test_a_roster_is_made_of_what_machines_offer_at_that_moment(machine):
    a = machine("a", 0, (2, 2)).join()
    b = machine("b").join()
    assert a.joined() == b.joined() == ["a:2", "b:2"]
    b.nodes.offer(1)
    assert a.join().joined() == b.join().joined() == ["a:2", "b:1"]


def test_a_machine_that_died_just_before_the_roster_ends_the_attempt_and_not_the_run(machine):
    """Its agent never says how many ranks it starts."""
    a = machine("a", 0, (1, 2)).join()
    b = machine("b").join()
    a.joined(), b.joined()
    b.fall_silent()
    assert a.join().joined() == ["a:2", "b:2"], "its last heartbeat is not old enough"
    store = NodeRendezvous(a.nodes, "run").next_rendezvous().store
    store.set("0", "two ranks")
    begun = time.monotonic()
    with pytest.raises(PeerFailedError):
        store.multi_get(["0", "1"])
    assert time.monotonic() - begun < SILENT_S + 5
    report = a.nodes.silence()
    assert report is not None
    assert report["silent"] == 1
    assert report["seconds"] > SILENT_S
    assert a.join().joined() == ["a:2"]


def test_a_machine_is_taken_in_again_after_a_roster_that_had_it_though_it_was_gone(machine):
    """That it is in a roster is no heartbeat of it: its next supervisor is no second one."""
    a = machine("a", 0, (1, 2)).join()
    b = machine("b").join()
    a.joined(), b.joined()
    b.fall_silent()
    again = machine("b", process="b-2").join()
    until(lambda: 2 in a.nodes.known, 10)
    for _ in range(3):  # attempts that end at once
        a.join().joined()
        time.sleep(0.4)
    until(lambda: a.nodes.present() == [0, 2], 10)
    assert a.join().joined() == again.joined() == ["a:2", "b:2"]


def test_a_silence_that_ends_still_ends_the_attempt_with_a_report_of_it(machine):
    a = machine("a", 0, (2, 2)).join()
    b = machine("b").join()
    a.joined(), b.joined()
    for one, other in ((a, 1), (b, 0)):
        assert one.nodes.silence() is None
        heard = one.nodes._last_seen[other][0]
        one.nodes._last_seen[other] = (heard, time.monotonic() - SILENT_S - 1)
        assert one.nodes.peer_failed()
        until(lambda: not one.nodes.silent_nodes(), 10)  # noqa: B023  # it is heard again
        assert one.nodes.peer_failed(), "its ranks are not started again in this attempt"
        report = one.nodes.silence()
        assert report is not None
        assert report["silent"] == other
    assert a.join().joined() == b.join().joined()
    assert not a.nodes.peer_failed()
    assert a.nodes.silence() is None


def test_too_few_end_by_a_sentence_on_every_node(machine):
    a = machine("a", 0, (3, 4), timeout_s=1.5).join()
    b = machine("b").join()
    with pytest.raises(LaunchError, match=r"2 of at least 3 nodes are at .*; none came within 2 s"):
        a.joined()
    with pytest.raises(RunEndedError, match="2 of at least 3 nodes"):
        b.joined()


def test_a_second_start_on_a_machine_that_answers_is_refused(machine):
    a = machine("a", 0, (2, 3)).join()
    b = machine("b").join()
    a.joined(), b.joined()
    with pytest.raises(LaunchError, match="has joined already, by another process"):
        machine("b", process="b-2").join().joined()
    assert not a.nodes.peer_failed()


def test_a_supervisor_that_lost_the_connection_takes_its_own_place_at_once(machine):
    a = machine("a", 0, (1, 2)).join()
    b = machine("b").join()
    a.joined(), b.joined()
    again = machine("b").join()
    until(a.nodes.peer_failed, 10)
    assert a.join().joined() == again.joined() == ["a:2", "b:2"]
    assert again.nodes.id == 2


def test_storage_that_does_not_answer_holds_up_no_heartbeat(machine):
    stuck, released = threading.Event(), threading.Event()

    def write(grows: bool) -> None:
        stuck.set()
        released.wait(30)

    a = machine("a", 0, (1, 3), on_growth=write).join()
    b = machine("b").join()
    a.joined(), b.joined()
    machine("c").join()
    try:
        assert stuck.wait(10)
        time.sleep(SILENT_S + 0.5)
        assert not b.nodes.peer_failed()
    finally:
        released.set()


def test_growth_is_asked_for_no_longer_when_the_machine_that_waits_has_gone(machine):
    told: list[bool] = []
    a = machine("a", 0, (1, 2), on_growth=told.append).join()
    assert a.joined() == ["a:2"]
    b = machine("b").join()
    until(lambda: True in told, 10)
    b.fall_silent()
    until(lambda: told[-1] is False, 10)
    assert not a.nodes.peer_failed()


def test_shares_are_computed_anew_only_for_other_machines_or_offers(machine):
    asked: list[list[int]] = []

    def share(offers: Sequence[int]) -> list[int]:
        asked.append(list(offers))
        return [2] + [0] * (len(offers) - 1)

    a = machine("a", 0, (1, 2), share=share).join()
    assert a.joined() == ["a:2"]
    b = machine("b").join()
    until(lambda: asked[-1] == [2, 2], 10)
    time.sleep(0.5)  # some heartbeats
    b.nodes.offer(1)
    until(lambda: asked[-1] == [2, 1], 10)
    assert asked.count([2, 2]) == asked.count([2, 1]) == 1


def test_a_machine_that_leaves_is_not_in_the_roster_after_the_next_checkpoint(machine):
    regroup, leaving = threading.Event(), threading.Event()
    a = machine("a", 0, (1, 2), on_growth=lambda more: regroup.set() if more else None).join()
    b = machine("b", leaving=leaving).join()
    assert a.joined() == b.joined() == ["a:2", "b:2"]
    leaving.set()
    until(regroup.is_set, 10)
    assert not a.nodes.peer_failed(), "its ranks go on until then"
    assert not b.nodes.peer_failed()
    assert a.join().joined() == ["a:2"]


@pytest.mark.parametrize("where", [0, 1])
def test_a_requested_stop_ends_a_wait_for_other_machines(machine, where):
    def stop() -> None:
        raise RunEndedError(0)

    checks = [{}, {}]
    checks[where] = {"check": stop}
    a = machine("a", 0, (3, 3), **checks[0])
    b = machine("b", **checks[1])
    waiting = (a, b)[where].join()
    with pytest.raises(RunEndedError):
        waiting.joined()


def test_the_end_reaches_a_machine_that_offers_no_rank(machine):
    a = machine("a", 0, (1, 2)).join()
    b = machine("b", ranks=0).join()
    assert a.joined() == ["a:2"]
    until(lambda: 1 in a.nodes.known, 10)
    begun = time.monotonic()
    a.nodes.end("it is over")
    assert time.monotonic() - begun >= 2 * membership.HEARTBEAT_S, "the store stays for so long"
    with pytest.raises(RunEndedError, match="it is over"):
        b.joined()


def test_those_who_wait_for_node_0_alone_agree_who_is_next(machine):
    a = machine("a", 0, (1, 3), share=lambda offers: [2] + [0] * (len(offers) - 1)).join()
    assert a.joined() == ["a:2"]
    b, c = machine("b").join(), machine("c").join()
    for one, address in ((b, "10.0.0.2"), (c, "10.0.0.3")):  # as of two machines
        one.nodes.me = membership.replace(one.nodes.me, address=address)
        one.nodes.offer(2)
    until(lambda: b.nodes.successor == c.nodes.successor == "10.0.0.2", 10)


def test_a_node_that_gives_node_0_up_leaves_no_thread_that_asks_it(machine):
    a = machine("a", 0, (2, 2))
    b = machine("b")
    threads = set(threading.enumerate())
    b.join()
    until(lambda: len(set(threading.enumerate()) - threads) >= 2, 10)
    a.fall_silent()
    with pytest.raises(Node0LostError):
        b.joined()
    b.nodes.close()
    until(lambda: not set(threading.enumerate()) - threads, 10)


def test_a_node_without_ranks_waits_and_the_end_of_the_run_reaches_it(machine):
    a = machine("a", 0, (2, 2), share=lambda offers: [2, 0]).join()
    b = machine("b").join()
    assert a.joined() == ["a:2"]
    a.nodes.end(0)
    with pytest.raises(RunEndedError) as ended:
        b.joined()
    assert ended.value.why == 0


def test_a_recipe_that_no_number_of_ranks_can_split_ends_all(machine):
    def share(offers: Sequence[int]) -> list[int]:
        raise RecipeError("training.global_batch_size: 1 cannot feed")

    a = machine("a", 0, (2, 2), share=share).join()
    b = machine("b").join()
    with pytest.raises(LaunchError, match="cannot feed"):
        a.joined()
    with pytest.raises(RunEndedError, match="cannot feed"):
        b.joined()


def test_without_node_0_the_others_know_who_is_next(machine):
    a = machine("a", 0, (3, 3)).join()
    b, c = machine("b").join(), machine("c").join()
    a.joined(), b.joined(), c.joined()
    until(lambda: b.nodes._published and c.nodes._published, 10)
    assert b.nodes.successor == c.nodes.successor == b.nodes.me.address
    a.fall_silent()
    until(b.nodes.peer_failed, 10)
    assert b.nodes.decide(None, lambda reports: {"lost": reports}) == {
        "lost": [None, {"silent": 0}]
    }
    with pytest.raises(Node0LostError):
        b.join().joined()
