"""The rendezvous of all ranks: one TCPStore, on one address, hosted by one process.

torch's own store listens on every interface, and any client of it can run code in the ranks. So
muster opens the socket itself: on the loopback for one machine, on the given address for several.
A supervisor of one machine needs no socket at all.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from muster.errors import LaunchError
from muster.hardware import rehearsal
from muster.launch import addresses, local_store, secret
from muster.launch.addresses import refuse_loopback
from muster.launch.cluster import Node, RankInfo
from muster.launch.signed_store import SignedStore
from muster.reading.json_file import parse, parse_value
from muster.reading.text import in_one_line

LOOPBACK = "127.0.0.1"


def host(address: str, port: int, timeout_s: float) -> Any:
    """A store that listens on `address` only; `port` 0 takes a free one."""
    listener = addresses.listen(address, port)
    own, port = listener.getsockname()[:2]
    return dist.TCPStore(  # type: ignore[attr-defined]
        own,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def connect(address: str, port: int, timeout_s: float) -> Any:
    """Connect to the store that another process hosts, once it listens."""
    _wait_for_listener(address, port, timeout_s)
    found: list[Any] = []
    limit = datetime.timedelta(seconds=timeout_s)

    def open_store() -> None:
        with suppress(RuntimeError):
            found.append(
                dist.TCPStore(  # type: ignore[attr-defined]
                    address, port, is_master=False, wait_for_workers=False, timeout=limit
                )
            )

    connecting = threading.Thread(target=open_store, daemon=True)
    connecting.start()
    connecting.join(timeout_s)  # another service on that port would block torch for ever
    if not found:
        raise LaunchError(
            f"{address}:{port} answers, but it is no TCPStore; is another service on that port? "
            "Choose another one with --master-port, the same on every machine"
        )
    return found[0]


def _wait_for_listener(address: str, port: int, timeout_s: float) -> None:
    """torch waits too, but raises a stack trace and takes twice its timeout."""
    end, problem = time.monotonic() + timeout_s, "no answer"
    while True:
        left = end - time.monotonic()
        if left <= 0:
            raise LaunchError(
                f"no connection to {address}:{port} within {timeout_s:.0f} s ({problem}); start node "
                "0 (rank 0) there, open the port in the firewall, and give the same address and "
                "port on every machine"
            )
        try:
            socket.create_connection((address, port), timeout=min(left, 5.0)).close()
            return
        except OSError as error:
            problem = error.strerror or str(error)
            time.sleep(min(0.1, left))


def for_node(node: Node, timeout_s: float) -> Any:
    """The store of all nodes' supervisors: node 0 hosts it."""
    if node.nodes > 1:
        refuse_loopback(node.address)
    if node.rank == 0:
        return host(node.address, node.port, timeout_s)
    return connect(node.address, node.port, timeout_s)


def for_supervisor(node: Node, timeout_s: float) -> Any:
    """The same where ranks of one machine have a store of their own: then it is in this process."""
    if node.nodes > 1:
        return for_node(node, timeout_s)
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    return store


def for_rank(rank_info: RankInfo, timeout_s: float) -> Any:
    """The store of all ranks: a file of their supervisor's on one machine; else their agent hosts it where
    there is one, or rank 0.

    Each attempt of a restarted run has its own key prefix.
    """
    if rank_info.world > rank_info.local_world:
        refuse_loopback(rank_info.address)
    if store := local_store.of_rank(rank_info, timeout_s):
        pass
    elif rank_info.rank == 0 and not rank_info.agent:
        store = host(rank_info.address, rank_info.port, timeout_s)
    else:
        store = connect(rank_info.address, rank_info.port, timeout_s)
    return dist.PrefixStore(f"ranks/{rank_info.store_prefix}", store)  # type: ignore[attr-defined]


def register(store: Any, rank_info: RankInfo, device: str | None, timeout_s: float) -> None:
    """Every rank posts its device; two ranks on one device, or a missing rank, end the run.

    `device` identifies it on its host, such as a GPU's UUID; None for CPUs. This is before the first
    collective, where NCCL would only report `unhandled system error`. Without MUSTER_SECRET, which ranks
    of muster's supervisor always have, anyone who reaches the store may write these messages.
    """
    store = SignedStore(store, secret.from_environment(), f"ranks/{rank_info.store_prefix}")
    mine = {"host": os.uname().nodename, "pid": os.getpid(), "device": device}
    store.set(f"registered/{rank_info.rank}", json.dumps(mine))
    if rank_info.rank == 0:
        store.set("problem", json.dumps(_find_problem(store, rank_info, timeout_s)))
    try:
        store.wait(["problem"], datetime.timedelta(seconds=timeout_s + 10))
    except RuntimeError:
        raise LaunchError(
            f"rank 0 at {rank_info.address} did not answer within {timeout_s:.0f} s; its log says why"
        ) from None
    if problem := parse_value(store.get("problem"), "the verdict of rank 0"):
        raise LaunchError(in_one_line(problem, most=1000))


def _find_problem(store: SignedStore, rank_info: RankInfo, timeout_s: float) -> str | None:
    keys = [f"registered/{rank}" for rank in range(rank_info.world)]
    try:
        store.wait(keys, datetime.timedelta(seconds=timeout_s))
    except RuntimeError:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        return (
            f"{_ranks(missing)} did not join within {timeout_s:.0f} s; see {_logs(missing)} for why"
        )
    owners: dict[tuple[str, str], int] = {}
    for rank, text in enumerate(store.multi_get(keys)):
        entry = parse(text, f"the device of rank {rank}")
        host, device = str(entry.get("host")), entry.get("device")
        if device is None:
            continue
        first = owners.setdefault((host, str(device)), rank)
        if first != rank and not rehearsal.active():
            return (
                f"ranks {first} and {rank} share one GPU of {host} ({device}); start "
                "as many ranks as there are GPUs, and check CUDA_VISIBLE_DEVICES and LOCAL_RANK; or "
                f"let ranks share GPUs with {rehearsal.FLAG}"
            )
    return None


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _logs(ranks: list[int]) -> str:
    return ", ".join(f"ranks/{rank}.log" for rank in ranks[:8])
