"""The rendezvous: where the store listens, and the errors of ranks that do not join."""

from __future__ import annotations

import os
import socket
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from muster.errors import LaunchError
from muster.launch import addresses, rendezvous
from muster.launch.cluster import Node, RankInfo
from processes import until


def test_one_machines_store_listens_on_the_loopback_only():
    store = rendezvous.for_node(Node(), 10.0)
    listening = {
        c.laddr.ip
        for c in psutil.Process().net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.port == store.port
    }
    assert listening == {"127.0.0.1"}


def test_a_busy_port_is_reported_with_the_process_that_holds_it():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"port {port} .*pid {os.getpid()}.*--master-port"):
            rendezvous.host("127.0.0.1", port, 5.0)


def test_nobody_at_the_address_is_told_within_the_limit():
    with socket.socket() as taken:  # so that no other process listens there
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"no connection to 127.0.0.1:{port} within 1 s"):
            rendezvous.connect("127.0.0.1", port, 1.0)


def test_another_service_on_the_port_is_told_within_the_limit(monkeypatch):
    """No time passes until it answers."""
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=time.sleep)
    monkeypatch.setattr(rendezvous, "time", clock)
    with socket.create_server(("127.0.0.1", 0)) as other:  # listens, and never says a word
        port = other.getsockname()[1]
        with pytest.raises(LaunchError, match=f"127.0.0.1:{port} answers, but it is no TCPStore"):
            rendezvous.connect("127.0.0.1", port, 1.0)


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.0.1.1", "::1"])
def test_a_loopback_is_no_address_for_several_machines(address):
    with pytest.raises(LaunchError, match="is a loopback address"):
        addresses.refuse_loopback(address)


def come(devices: dict[int, str | None], world: int, limit_s: float = 60.0) -> dict[int, str]:
    """The error of each rank that registers; none for one that succeeds. Rank 0, whose limit counts, is
    the last to come."""
    store = rendezvous.host("127.0.0.1", 0, 60.0)
    said: dict[int, str] = {}

    def register(rank: int) -> None:
        rank_info = RankInfo(rank, world, rank, world, "127.0.0.1", store.port, agent=True)
        try:
            mine = rendezvous.for_rank(rank_info, 60.0)
            if rank == 0:
                until(lambda: mine.check([f"registered/{other}" for other in devices if other]))
            rendezvous.register(mine, rank_info, devices[rank], limit_s)
        except LaunchError as error:
            said[rank] = str(error)

    ranks = [threading.Thread(target=register, args=(rank,)) for rank in devices]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return said


def test_ranks_on_devices_of_their_own_go_on():
    assert come({0: "GPU-a", 1: "GPU-b", 2: None, 3: None}, 4) == {}


def test_two_ranks_on_one_gpu_are_named_to_all_before_nccl_starts():
    said = come({0: "GPU-a", 1: "GPU-b", 2: "GPU-a"}, 3)
    assert set(said) == {0, 1, 2}
    assert all(
        "ranks 0 and 2 share one GPU" in words and "GPU-a" in words for words in said.values()
    )


def test_a_rank_that_does_not_come_is_named():
    said = come({0: None, 2: None}, 3, limit_s=1.5)
    assert all(
        "rank 1 did not join within 2 s; see ranks/1.log" in words for words in said.values()
    )
    assert set(said) == {0, 2}
