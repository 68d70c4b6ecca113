"""The supervisor of an elastic run while it waits for other machines. In this process, without ranks."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
import yaml

from muster.errors import LaunchError
from muster.launch import elastic, local, published, signals
from muster.launch.cluster import Node
from muster.launch.elastic import ElasticSupervisor
from muster.launch.nodes import RunEndedError
from muster.observe.results import REGROUP_FILE, STOP_FILE
from muster.recipe.load import load
from muster.run_directory import Run


@pytest.fixture
def supervisor(recipe, tmp_path) -> Iterator[Callable[[int], ElasticSupervisor]]:
    """`supervisor(rank)` of an elastic run; its own store is in this process."""
    document = load(recipe, ["distributed.timeout_s=1", "distributed.stall_s=1"]).as_dict()
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(document))
    Run(tmp_path).update(state="running")
    made: list[ElasticSupervisor] = []

    def make(rank: int) -> ElasticSupervisor:
        one = ElasticSupervisor(Run(tmp_path), 1, Node(), None)
        one.nodes = one._connect(secrets.token_bytes(32))
        one.node = Node(rank, 2, "10.0.0.1", 29500, 1)
        made.append(one)
        return one

    yield make
    for one in made:
        one.nodes.close()


def test_a_stop_that_is_requested_while_node_0_waits_ends_the_run_as_stopped(supervisor):
    one = supervisor(0)
    one._check_wait()
    (one.run.path / STOP_FILE).touch()
    with pytest.raises(RunEndedError) as ended:
        one._check_wait()
    assert ended.value.why == 0
    assert one.run.info()["state"] == "stopped"
    assert one.nodes.store.get("ended") == b"0"


def test_a_stop_that_is_requested_while_another_node_waits_ends_it_and_is_no_state_of_the_run(
    supervisor,
):
    one = supervisor(1)
    one.nodes._last_seen[0] = (b"", 0.0)
    (one.run.path / STOP_FILE).touch()
    with pytest.raises(RunEndedError):
        one._find_node_0()
    assert one.run.info()["state"] == "running"


def test_a_machine_that_is_told_to_go_while_it_waits_leaves_and_asks_nobody_to_stop(
    supervisor, monkeypatch
):
    told = threading.Event()
    monkeypatch.setattr(elastic, "LEAVE", told)
    one = supervisor(1)
    kept = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    try:
        signals.leave_on_signal(one.run, told.set)
        os.kill(os.getpid(), signal.SIGTERM)
        assert told.wait(5)
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGUSR1), kept, strict=True):
            signal.signal(number, handler)
    with pytest.raises(RunEndedError):
        one._check_wait()
    assert one.nodes.me.ranks == 0
    assert not (one.run.path / STOP_FILE).exists()


def test_a_node_0_that_is_not_found_is_named_with_the_last_reason(supervisor, monkeypatch):
    one = supervisor(1)
    one.nodes._last_seen[0] = (b"", 0.0)

    def find(*_: object) -> bytes:
        raise LaunchError("10.0.0.1:29500 answers, but publishes no run of muster's")

    monkeypatch.setattr(published, "secret_of", find)
    monkeypatch.setattr(elastic, "AGAIN_S", 0.1)
    words = r"could not be reached for 1 s more \(the last try: 10.0.0.1:29500 answers, but publishes no run"
    with pytest.raises(LaunchError, match=words):
        one._find_node_0()


def test_a_request_for_growth_is_taken_back(supervisor):
    one = supervisor(0)
    one._ask_to_regroup(True)
    assert (one.run.path / REGROUP_FILE).exists()
    one._ask_to_regroup(False)
    one._ask_to_regroup(False)
    assert not (one.run.path / REGROUP_FILE).exists()


def test_how_this_node_failed_in_an_earlier_start_is_not_told_of_the_next(tmp_path):
    run, node = Run(tmp_path), Node(1, 2, "10.0.0.1", 29500)
    local.node_report(run, node).write_text('{"what": "Node 0 is lost."}')
    seen = []

    class Standby:
        process = None

        def begin(self, *_: object) -> None:
            seen.append(local.node_report(run, node).exists())

    local.start(run, 1, node, standby=Standby())
    assert seen == [False]
