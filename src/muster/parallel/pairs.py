"""Ranks that meet two by two: who meets whom and when, and a block sent one way."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import torch.distributed as dist
from torch import Tensor

ONE_AT_A_TIME = 16  # ranks: up to these, a pair has the machine and the network to itself


def opponents(rank: int, world: int) -> Iterator[int | None]:
    """Whom to meet in each round of a tournament: all pairs, each rank once a round. None: a rest."""
    seats = world + world % 2
    for turn in range(seats - 1):
        if rank == seats - 1:
            other = turn * (seats // 2) % (seats - 1)
        else:
            other = (turn - rank) % (seats - 1)
            other = seats - 1 if other == rank else other
        yield other if other < world else None


def alone(rank: int, world: int) -> Iterator[int | None]:
    """Whom to meet when only one pair meets at a time."""
    for a, b in combinations(range(world), 2):
        yield {a: b, b: a}.get(rank)


def one_way(block: Tensor, word: Tensor, sender: int, receiver: int) -> None:
    """The block there and a word back: the sender then knows that all of it has come. NCCL's send, and
    gloo's, may return when the block has only left."""
    if dist.get_rank() == sender:
        dist.send(block, receiver)
        dist.recv(word, receiver)
    else:
        dist.recv(block, sender)
        dist.send(word, sender)


def tell(other: int, count: Tensor) -> None:
    """The lower of two ranks decides."""
    if dist.get_rank() < other:
        dist.send(count, other)
    else:
        dist.recv(count, other)
