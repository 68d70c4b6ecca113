"""Which weights a rank holds: the model cut by tensor and pipeline ranks, then dealt out in shards."""

from __future__ import annotations

import fnmatch
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from muster.models.plan import ParallelPlan
from muster.parallel.layout import Layout
from muster.parallel.pipeline import cut_evenly, layer_costs
from muster.plan.subject import Subject

FLOAT = 4  # bytes of the weights that learn
CUT = {"embedding": 0, "heads": 0, "column": 0, "head": 0, "row": 1}  # word → dimension

# Which of a pipeline rank's parts of the model, and which block of it; None is all the rest.
Group = tuple[int, str | None]
REST: Group = (0, None)


@dataclass(frozen=True)
class Piece:
    """A parameter as one rank has it before sharding."""

    name: str
    shape: tuple[int, ...]
    trained: bool
    group: Group  # what FSDP gathers it with

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def cut(size: int, parts: int, part: int) -> int:
    """Of `size` rows dealt out evenly, how many `part` gets: the last ones get what is left."""
    rows = -(-size // parts)
    return min(rows, max(0, size - part * rows))


@dataclass(frozen=True)
class Stage:
    """What one pipeline rank holds; without a pipeline, everything."""

    pieces: tuple[Piece, ...]
    layers: int  # blocks, in all of its parts
    first: bool
    last: bool
    buffers: int = 0  # bytes of what does not learn and is not sharded: tables, running averages
    tied: bool = False  # the embedding is the head too

    @cached_property
    def early(self) -> int:
        """Numbers outside of blocks whose gradients come before those of the blocks."""
        blocks = (i for i, piece in enumerate(self.pieces) if piece.group != REST)
        start = 0 if self.tied else next(blocks, 0)
        return sum(p.numel for p in self.pieces[start:] if p.group == REST and p.trained)

    @cached_property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)

    @cached_property
    def trained(self) -> int:
        return sum(piece.numel for piece in self.pieces if piece.trained)

    def shards(self, count: int, shard: int = 0, *, trained: bool = False) -> int:
        """Numbers that FSDP gives one of `count` shards; the first has as many as any."""
        return sum(self.groups(count, shard, trained=trained).values())

    def groups(self, count: int = 1, shard: int = 0, *, trained: bool = False) -> dict[Group, int]:
        """The same by what FSDP gathers at a time."""
        sizes: dict[Group, int] = {}
        for piece in self.pieces:
            if piece.trained or not trained:
                first, *others = piece.shape or (1,)
                mine = cut(first, count, shard) * math.prod(others)
                sizes[piece.group] = sizes.get(piece.group, 0) + mine
        return sizes


def stages(
    subject: Subject, layout: Layout, *, per_rank: int = 1, tensor_rank: int = 0
) -> list[Stage]:
    """By pipeline rank, as one of its tensor ranks has it; the first has as much as any. `per_rank`:
    parts of the model on each pipeline rank, under a schedule that interleaves them."""
    plan, place = subject.plan, (layout.tensor, tensor_rank)
    if layout.pipeline == 1:
        return [_stage([subject.model], plan, place, first=True, last=True)]
    cuts = cut_evenly(layer_costs(plan), layout.pipeline * per_rank)
    found = []
    for rank in range(layout.pipeline):
        with torch.device("meta"):
            parts = [subject.task.build_part(*ends) for ends in cuts[rank :: layout.pipeline]]
        found.append(_stage(parts, plan, place, first=rank == 0, last=rank == layout.pipeline - 1))
    return found


def _stage(
    parts: list[nn.Module], plan: ParallelPlan, place: tuple[int, int], *, first: bool, last: bool
) -> Stage:
    pieces: list[Piece] = []
    layers = 0
    for i, part in enumerate(parts):
        blocks = [n for n, m in part.named_modules() if type(m).__name__ in plan.blocks]
        layers += len(blocks)
        for name, p in part.named_parameters():
            block = next((b for b in blocks if name.startswith(f"{b}.")), None)
            shape = local_shape(name, tuple(p.shape), plan, *place)
            pieces.append(Piece(name, shape, p.requires_grad, (i, block)))
    buffers = sum(b.numel() * b.element_size() for part in parts for b in part.buffers())
    return Stage(tuple(pieces), layers, first, last, buffers, plan.tied)


def local_shape(
    name: str, shape: tuple[int, ...], plan: ParallelPlan, ranks: int, rank: int
) -> tuple[int, ...]:
    """What a tensor rank holds of a parameter, by the model's own plan."""
    module = name.rpartition(".")[0]
    how = next((h for pattern, h in plan.tensor.items() if fnmatch.fnmatch(module, pattern)), "")
    dim = CUT.get(how)
    if dim is None or dim >= len(shape):  # the bias of a sum is added once, by everyone
        return shape
    return (*shape[:dim], cut(shape[dim], ranks, rank), *shape[dim + 1 :])
