"""Supervisors of several nodes: rendezvous, duplicate node ranks, lost nodes. Two in one process."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from muster.errors import LaunchError
from muster.launch import addresses
from muster.launch import nodes as nodes_module
from muster.launch.cluster import Node
from muster.launch.nodes import Nodes
from processes import until

OUTSIDE = [a for a in addresses.own_addresses() if not ipaddress.ip_address(a).is_loopback]

pytestmark = pytest.mark.skipif(not OUTSIDE, reason="needs an address besides the loopback")


@pytest.fixture
def pair() -> Iterator[Callable[..., tuple[Nodes, Nodes]]]:
    made: list[Nodes] = []

    def make(stall_limit_s: float = 60.0, ranks: tuple[int, ...] = (0, 1)) -> tuple[Nodes, ...]:
        for rank in ranks:
            port = made[0].port if made else 0
            made.append(Nodes(Node(rank, 2, OUTSIDE[0], port), 60.0, stall_limit_s))
        return tuple(made)

    yield make
    for nodes in reversed(made):
        nodes.close()


def both_arrive(one: Nodes, other: Nodes) -> None:
    arriving = threading.Thread(target=other.join)
    arriving.start()
    one.join()
    arriving.join()


def test_a_node_that_comes_late_is_not_taken_for_silent(pair, monkeypatch):
    """By a clock that stands still but for the delay."""
    now, waits = [0.0], threading.Event()

    def sleep(seconds: float) -> None:
        waits.set()
        time.sleep(seconds)

    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time, sleep=sleep)
    monkeypatch.setattr(nodes_module, "time", clock)
    (one,) = pair(stall_limit_s=2.0, ranks=(0,))

    def come() -> None:
        assert waits.wait(60)
        now[0] += 3.0
        pair(stall_limit_s=2.0, ranks=(1,))[1].join()

    late = threading.Thread(target=come)
    late.start()
    one.join()
    assert not one.peer_failed()
    late.join()
    assert len(one.hosts) == 2


def test_a_failure_on_one_node_ends_the_ranks_of_the_other_in_that_attempt_only(pair):
    one, other = pair()
    both_arrive(one, other)
    other.report_failure()
    until(one.peer_failed)
    both_arrive(one, other)
    time.sleep(1.5)
    assert not one.peer_failed()


def test_node_0_hears_every_account_and_all_hear_its_verdict(pair):
    one, other = pair()
    both_arrive(one, other)
    heard = []

    def judge(reports):
        heard.extend(reports)
        return {"again": False, "exit_code": 1}

    verdicts = []
    asking = threading.Thread(target=lambda: verdicts.append(other.decide({"rank": 3}, judge)))
    asking.start()
    verdicts.append(one.decide(None, judge))
    asking.join()
    assert heard == [None, {"rank": 3}]
    assert verdicts == [{"again": False, "exit_code": 1}] * 2


def test_two_machines_with_one_node_rank_are_refused(pair):
    one, other, impostor = pair(ranks=(0, 1, 1))
    both_arrive(one, other)
    with pytest.raises(LaunchError, match="has already joined as node 1; give every machine"):
        impostor.join()


def test_a_message_that_cannot_be_used_ends_no_heartbeats(pair, monkeypatch, caplog):
    """A key that is removed while it is read, a roster of another version."""
    one, other = pair()

    def broken(store: object) -> None:
        raise RuntimeError("roster was removed from the store, or overwritten")

    monkeypatch.setattr(other, "_watch", broken)
    both_arrive(one, other)
    until(lambda: "cannot be used: roster was removed" in caplog.text)
    before = one._last_seen[1][0]
    until(lambda: one._last_seen[1][0] != before)
    assert other._heartbeats.is_alive()
    assert caplog.text.count("cannot be used") == 1, "told once"


def test_every_node_has_the_hosts_of_all_from_node_0_at_once(pair):
    one, other = pair()
    both_arrive(one, other)
    assert list(one.hosts) == list(other.hosts) == [0, 1]
    assert other.store.check(["1/hosts/"])
