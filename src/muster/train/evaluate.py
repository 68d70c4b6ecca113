"""Scoring a split: every sample on exactly one rank, counts added up, rates taken once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from muster.data.batches import eval_shard
from muster.data.corpus import Split
from muster.data.loader import Inputs, Source
from muster.parallel.mesh import Mesh
from muster.tasks.base import Example, Task

WORST = 20


@dataclass(frozen=True)
class Evaluation:
    split: str
    scores: dict[str, float]
    worst: list[Example]


class Scored(Protocol):
    """A model as evaluation sees it: an engine, or `Alone`."""

    parts: list[nn.Module]

    def forward(self, inputs: Inputs) -> Any: ...


class Alone:
    """A whole model in one process."""

    def __init__(self, model: nn.Module) -> None:
        self.parts = [model]

    def forward(self, inputs: Inputs) -> Any:
        return self.parts[0](*inputs.args, **inputs.shared)


@torch.no_grad()
def evaluate(
    task: Task,
    model: Scored,
    split: Split,
    mesh: Mesh,
    batch_size: int,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Evaluation | None:
    """Scores of `split`, the same whatever the world size; None where there is no such split."""
    source = task.source(split)
    if source is None:
        return None
    training = [part.training for part in model.parts]
    for part in model.parts:
        part.eval()
    counts: Counter[str] = Counter()
    examples: list[Example] = []
    for ids, counted in _rounds(source, mesh, batch_size):
        batch = task.prepare(task.collate([source.load(i) for i in ids], None).to(mesh.device))
        with autocast():
            output = model.forward(task.inputs(batch))
            if output is not None and counted and mesh.speaks:
                score = task.score(output, batch)
                counts.update(score.counts)
                examples += score.examples
    for part, was in zip(model.parts, training, strict=True):
        part.train(was)
    worst = sorted(examples, key=lambda e: (-e.edits, e.id))[:WORST]
    total: Counter[str] = Counter()
    everyone: list[Example] = []
    for their_counts, their_worst in mesh.gather((dict(counts), worst)):
        total.update(their_counts)
        everyone += their_worst
    everyone.sort(key=lambda e: (-e.edits, e.id))
    return Evaluation(split, task.summarise(dict(total)), everyone[:WORST])


def _rounds(source: Source, mesh: Mesh, batch_size: int) -> Iterator[tuple[list[int], bool]]:
    """This rank's batches, and whether each counts.

    Where a forward pass takes all ranks, those with fewer batches keep the others company with one
    that does not count.
    """
    mine = eval_shard(source.lengths, mesh.data_rank, mesh.layout.data_ranks, batch_size)
    yield from ((ids, True) for ids in mine)
    if mesh.layout.collective_forward:
        most = math.ceil(math.ceil(len(source) / mesh.layout.data_ranks) / batch_size)
        for _ in range(most - len(mine)):
            yield [0], False
