"""Ranks as children of this process, by torch.multiprocessing."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

from muster.hardware.cpus import asked_threads
from muster.launch import rendezvous, secret


def spawn(function: Callable[..., Any], arguments: tuple[Any, ...], ranks: int) -> None:
    """Call `function` in `ranks` processes, with torchrun's variables for the rendezvous.

    The parent hosts the store on a port that the system chose, so it cannot be in use.
    """
    store = rendezvous.host(rendezvous.LOOPBACK, 0, 300.0)
    mp.spawn(  # type: ignore[attr-defined]
        _child, args=(ranks, store.port, secret.drawn(), function, arguments), nprocs=ranks
    )


def _child(
    rank: int, ranks: int, port: int, drawn: str, function: Callable[..., Any], arguments: Any
) -> None:
    os.environ.setdefault(secret.VARIABLE, drawn)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR=rendezvous.LOOPBACK,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    import torch

    torch.set_num_threads(asked_threads() or max(1, len(os.sched_getaffinity(0)) // ranks))
    function(*arguments)
