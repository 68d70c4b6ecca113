"""Which weights a rank holds: the model split by tensor and pipeline ranks, then sharded."""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from muster.models.plan import ParallelPlan
from muster.parallel.layout import Layout
from muster.parallel.stages import cut_evenly
from muster.planner.subject import Subject

FLOAT = 4  # bytes of a float32
CUT = {"embedding": 0, "heads": 0, "column": 0, "head": 0, "row": 1}  # → sharded dimension

# (stage of a pipeline rank, name of the block); None for parameters outside of blocks.
Group = tuple[int, str | None]
REST: Group = (0, None)


@dataclass(frozen=True)
class LocalParameter:
    """A parameter as one rank has it before sharding."""

    name: str
    shape: tuple[int, ...]
    trained: bool
    group: Group  # FSDP parameter group

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def cut(size: int, parts: int, part: int) -> int:
    """Rows of chunk `part` where `size` rows are chunked as by torch.chunk."""
    rows = -(-size // parts)
    return min(rows, max(0, size - part * rows))


@dataclass(frozen=True)
class Stage:
    """What one pipeline rank holds; without a pipeline, everything."""

    parameters: tuple[LocalParameter, ...]
    depths: Mapping[str, int]  # blocks of each stack, in all of its stages
    first: bool
    last: bool
    buffers: int = 0  # bytes of the model's buffers, which are not sharded
    tied: int = 0  # elements of the embedding's weight that the head shares

    @property
    def layers(self) -> int:
        return sum(self.depths.values())

    @cached_property
    def early(self) -> int:
        """Elements outside of blocks whose gradients are ready before those of the blocks."""
        blocks = (i for i, p in enumerate(self.parameters) if p.group != REST)
        start = 0 if self.tied else next(blocks, 0)
        return sum(p.numel for p in self.parameters[start:] if p.group == REST and p.trained)

    @cached_property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)

    @cached_property
    def trained(self) -> int:
        return sum(p.numel for p in self.parameters if p.trained)

    def shards(self, count: int, shard: int = 0, *, trained: bool = False) -> int:
        """Elements of one of `count` FSDP shards; none is larger than the first."""
        return sum(self.groups(count, shard, trained=trained).values())

    def groups(
        self, count: int = 1, shard: int = 0, *, trained: bool = False
    ) -> Mapping[Group, int]:
        """The same by FSDP parameter group."""
        key = (count, shard, trained)
        if key not in self._groups:
            self._groups[key] = self._group_sizes(*key)
        return self._groups[key]

    @cached_property
    def _groups(self) -> dict[tuple[int, int, bool], dict[Group, int]]:
        return {}

    def _group_sizes(self, count: int, shard: int, trained: bool) -> dict[Group, int]:
        sizes: dict[Group, int] = {}
        for p in self.parameters:
            if p.trained or not trained:
                first, *others = p.shape or (1,)
                mine = cut(first, count, shard) * math.prod(others)
                sizes[p.group] = sizes.get(p.group, 0) + mine
        return sizes


def stages(
    subject: Subject, layout: Layout, *, per_rank: int = 1, tensor_rank: int = 0
) -> list[Stage]:
    """By pipeline rank, for one of its tensor ranks; none is larger than the first. `per_rank`:
    stages per pipeline rank, of an interleaved schedule."""
    plan, tensor_axis = subject.plan, (layout.tensor, tensor_rank)
    tied = 0
    if plan.tied:
        shape = tuple(subject.model.get_parameter(plan.tied).shape)
        tied = math.prod(local_shape(plan.tied, shape, plan, *tensor_axis))
    if layout.pipeline == 1:
        return [_stage([subject.model], plan, tensor_axis, first=True, last=True, tied=tied)]
    cuts = cut_evenly(plan.costs, layout.pipeline * per_rank)
    found = []
    for rank in range(layout.pipeline):
        parts = [subject.part(*ends) for ends in cuts[rank :: layout.pipeline]]
        last = rank == layout.pipeline - 1
        found.append(_stage(parts, plan, tensor_axis, first=rank == 0, last=last, tied=tied))
    return found


def _stage(
    parts: list[nn.Module],
    plan: ParallelPlan,
    tensor_axis: tuple[int, int],
    *,
    first: bool,
    last: bool,
    tied: int,
) -> Stage:
    parameters: list[LocalParameter] = []
    depths: Counter[str] = Counter()
    for i, part in enumerate(parts):
        blocks = [n for n, m in part.named_modules() if type(m).__name__ in plan.blocks]
        depths.update(block.rpartition(".")[0] for block in blocks)
        for name, p in part.named_parameters():
            block = next((b for b in blocks if name.startswith(f"{b}.")), None)
            shape = local_shape(name, tuple(p.shape), plan, *tensor_axis)
            parameters.append(LocalParameter(name, shape, p.requires_grad, (i, block)))
    buffers = sum(b.numel() * b.element_size() for part in parts for b in part.buffers())
    return Stage(tuple(parameters), depths, first, last, buffers, tied)


def local_shape(
    name: str, shape: tuple[int, ...], plan: ParallelPlan, ranks: int, rank: int
) -> tuple[int, ...]:
    """The local shape of a parameter on a tensor rank, by the model's parallel plan."""
    module = name.rpartition(".")[0]
    how = next((h for pattern, h in plan.tensor.items() if fnmatch.fnmatch(module, pattern)), "")
    dim = CUT.get(how)
    if dim is None or dim >= len(shape):  # the bias of a row-wise layer is replicated
        return shape
    return (*shape[:dim], cut(shape[dim], ranks, rank), *shape[dim + 1 :])
