"""The meeting point of all ranks: one store, on one address, held by one process.

torch's own store listens on every interface, and whoever reaches it can run code in the ranks. So
muster opens the socket itself: on the loopback for one machine, on the given address for several.
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
from muster.launch import addresses
from muster.launch.addresses import refuse_loopback
from muster.launch.cluster import Node, Place

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


def reach(address: str, port: int, timeout_s: float) -> Any:
    """The store that another process holds, once it listens."""
    _await_listener(address, port, timeout_s)
    found: list[Any] = []
    limit = datetime.timedelta(seconds=timeout_s)

    def connect() -> None:
        with suppress(RuntimeError):
            found.append(
                dist.TCPStore(  # type: ignore[attr-defined]
                    address, port, is_master=False, wait_for_workers=False, timeout=limit
                )
            )

    connecting = threading.Thread(target=connect, daemon=True)
    connecting.start()
    connecting.join(timeout_s)  # some other service would leave torch waiting for ever
    if not found:
        raise LaunchError(
            f"{address}:{port} answers, but it is not where ranks meet; is another service on that "
            "port? Choose another one with --master-port, the same on every machine"
        )
    return found[0]


def _await_listener(address: str, port: int, timeout_s: float) -> None:
    """torch waits too, but speaks in stack traces and takes its limit twice."""
    end, problem = time.monotonic() + timeout_s, "no answer"
    while True:
        left = end - time.monotonic()
        if left <= 0:
            raise LaunchError(
                f"nobody answered at {address}:{port} within {timeout_s:.0f} s ({problem}); start node "
                "0 (rank 0) there, let the port through the firewall, and give the same address and "
                "port on every machine"
            )
        try:
            socket.create_connection((address, port), timeout=min(left, 5.0)).close()
            return
        except OSError as error:
            problem = error.strerror or str(error)
            time.sleep(min(0.1, left))


def for_node(node: Node, timeout_s: float) -> Any:
    """The store of all nodes' supervisors: node 0 holds it."""
    if node.nodes > 1:
        refuse_loopback(node.address)
    if node.rank == 0:
        return host(node.address, node.port, timeout_s)
    return reach(node.address, node.port, timeout_s)


def for_rank(place: Place, timeout_s: float) -> Any:
    """The store of all ranks: their agent holds it where there is one, else rank 0 does.

    Each attempt of a restarted run writes under a prefix of its own.
    """
    if place.world > place.local_world:
        refuse_loopback(place.address)
    if place.rank == 0 and not place.agent:
        store = host(place.address, place.port, timeout_s)
    else:
        store = reach(place.address, place.port, timeout_s)
    return dist.PrefixStore(f"ranks/{place.meeting}", store)  # type: ignore[attr-defined]


def sign_in(store: Any, place: Place, device: str | None, timeout_s: float) -> None:
    """Every rank says where it computes; two on one device, or one that does not come, end the run.

    `device` is what tells it from all others of its host, such as a GPU's UUID; None for CPUs. This
    happens before the first collective: NCCL would only say `unhandled system error`.
    """
    mine = {"host": os.uname().nodename, "pid": os.getpid(), "device": device}
    store.set(f"here/{place.rank}", json.dumps(mine))
    if place.rank == 0:
        store.set("verdict", json.dumps(_verdict(store, place, timeout_s)))
    try:
        store.wait(["verdict"], datetime.timedelta(seconds=timeout_s + 10))
    except RuntimeError:
        raise LaunchError(
            f"rank 0 at {place.address} did not answer within {timeout_s:.0f} s; its log says why"
        ) from None
    if words := json.loads(store.get("verdict")):
        raise LaunchError(words)


def _verdict(store: Any, place: Place, timeout_s: float) -> str | None:
    keys = [f"here/{rank}" for rank in range(place.world)]
    try:
        store.wait(keys, datetime.timedelta(seconds=timeout_s))
    except RuntimeError:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        return (
            f"{_ranks(missing)} did not come within {timeout_s:.0f} s; see {_logs(missing)} for why"
        )
    owners: dict[tuple[str, str], int] = {}
    for rank, text in enumerate(store.multi_get(keys)):
        said = json.loads(text)
        if said["device"] is None:
            continue
        first = owners.setdefault((said["host"], said["device"]), rank)
        if first != rank:
            return (
                f"ranks {first} and {rank} share one GPU of {said['host']} ({said['device']}); start "
                "as many ranks as there are GPUs, and check CUDA_VISIBLE_DEVICES and LOCAL_RANK"
            )
    return None


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _logs(ranks: list[int]) -> str:
    return ", ".join(f"ranks/{rank}.log" for rank in ranks[:8])
