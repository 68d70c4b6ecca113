"""Pairs of ranks: schedules of all pairs, and a one-way transfer of a block."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import torch.distributed as dist
from torch import Tensor

ONE_AT_A_TIME = 16  # ranks: up to so many, pairs are measured one at a time


def round_robin(rank: int, world: int) -> Iterator[int | None]:
    """The peer in each round of a round-robin schedule: all pairs, each rank once a round. None: idle."""
    slots = world + world % 2
    for turn in range(slots - 1):
        if rank == slots - 1:
            other = turn * (slots // 2) % (slots - 1)
        else:
            other = (turn - rank) % (slots - 1)
            other = slots - 1 if other == rank else other
        yield other if other < world else None


def one_pair_at_a_time(rank: int, world: int) -> Iterator[int | None]:
    """The peer in each round when only one pair is active at a time."""
    for a, b in combinations(range(world), 2):
        yield {a: b, b: a}.get(rank)


def one_way(block: Tensor, ack: Tensor, sender: int, receiver: int) -> None:
    """Send the block and receive an acknowledgement, so that the sender knows that all of it has arrived:
    NCCL's send, and gloo's, may return earlier."""
    if dist.get_rank() == sender:
        dist.send(block, receiver)
        dist.recv(ack, receiver)
    else:
        dist.recv(block, sender)
        dist.send(ack, sender)


def agree_on_count(other: int, count: Tensor) -> None:
    """The lower of two ranks decides."""
    if dist.get_rank() < other:
        dist.send(count, other)
    else:
        dist.recv(count, other)
