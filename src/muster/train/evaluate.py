"""Scoring a split: every sample on exactly one rank, counts added up, rates taken once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from muster.data.batches import eval_shard
from muster.data.corpus import Split
from muster.parallel.mesh import Mesh
from muster.tasks.base import Example, Task

WORST = 20


@dataclass(frozen=True)
class Evaluation:
    split: str
    scores: dict[str, float]
    worst: list[Example]


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    split: Split,
    mesh: Mesh,
    batch_size: int,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Evaluation | None:
    """Scores of `split`, the same whatever the world size; None where there is no such split."""
    source = task.source(split)
    if source is None:
        return None
    was_training = model.training
    model.eval()
    counts: Counter[str] = Counter()
    examples: list[Example] = []
    for ids in eval_shard(source.lengths, mesh.data_rank, mesh.layout.data_ranks, batch_size):
        batch = task.collate([source.load(i) for i in ids], None).to(mesh.device)
        with autocast():
            score = task.score(model, task.prepare(batch))
        counts.update(score.counts)
        examples += score.examples
    model.train(was_training)
    worst = sorted(examples, key=lambda e: (-e.edits, e.id))[:WORST]
    total: Counter[str] = Counter()
    everyone: list[Example] = []
    for their_counts, their_worst in mesh.gather((dict(counts), worst)):
        total.update(their_counts)
        everyone += their_worst
    everyone.sort(key=lambda e: (-e.edits, e.id))
    return Evaluation(split, task.summarise(dict(total)), everyone[:WORST])
