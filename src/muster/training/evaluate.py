"""Scoring a split: every sample on exactly one rank, counts summed, then rates."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from muster.data.batches import eval_shards
from muster.data.corpus import Split
from muster.data.loader import Batch, Inputs, Source
from muster.observe.heartbeat import beat
from muster.parallel.context import share
from muster.parallel.mesh import Mesh
from muster.tasks.base import Example, Lengths, Task

WORST = 20
PREFETCH = 2  # batches


@dataclass(frozen=True)
class Evaluation:
    split: str
    scores: dict[str, float]
    worst: list[Example]
    left_out: dict[str, int]  # samples not scored, by reason
    remarks: list[str] = field(default_factory=list)  # what explains a bad score


class Scored(Protocol):
    """A model for evaluation: an engine, or `SingleProcess`."""

    parts: list[nn.Module]

    def forward(self, inputs: Inputs) -> Any: ...


class SingleProcess:
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
    progress: Callable[[int, int], None] = lambda done, batches: None,
) -> Evaluation | None:
    """Scores of `split`, the same whatever the world size; None where there is no such split. At most
    `evaluation.max_samples` of its samples are scored, always the same ones."""
    source = task.source(split)
    if source is None:
        return None
    training = [part.training for part in model.parts]
    for part in model.parts:
        part.eval()
    counts: Counter[str] = Counter()
    examples: list[Example] = []
    windows = task.windows(source.lengths, training=False)
    chosen = choose_samples(len(source), task.recipe.evaluation.max_samples)
    batches = list(_rank_batches(source, windows, mesh, batch_size, chosen))
    for number, (batch, counted) in enumerate(_prefetch(task, source, batches)):
        progress(number, len(batches))
        beat("evaluation")
        batch = share(task.prepare(batch.to(mesh.device)), mesh.layout, mesh.rank)
        with autocast():
            output = model.forward(task.eval_inputs(batch, mesh.any_rank))
            if output is not None and counted and mesh.has_loss:
                score = task.score(output, batch)
                counts.update(score.counts)
                examples += score.examples
    for part, was in zip(model.parts, training, strict=True):
        part.train(was)
    wrong = [example for example in examples if example.edits]
    worst = sorted(wrong, key=lambda e: (-e.edits, e.id))[:WORST]
    total: Counter[str] = Counter()
    all_examples: list[Example] = []
    for their_counts, their_worst in mesh.gather((dict(counts), worst)):
        total.update(their_counts)
        all_examples += their_worst
    all_examples.sort(key=lambda e: (-e.edits, e.id))
    log_bad_rows(source, mesh)
    left_out = dict(getattr(source, "left_out", {}))
    if beyond := len(source) - len(chosen):
        left_out[f"beyond evaluation.max_samples={len(chosen)}"] = beyond
    scores, worst = task.summarise(dict(total)), all_examples[:WORST]
    return Evaluation(split, scores, worst, left_out, task.remarks(scores, worst))


def choose_samples(count: int, limit: int | None) -> NDArray[np.int64]:
    """Which of `count` samples are scored: evenly spread, since files are often sorted."""
    if limit is None or limit >= count:
        return np.arange(count)
    return np.arange(limit) * count // limit


def log_bad_rows(source: Source, mesh: Mesh) -> None:
    """Gather the broken samples of all ranks, so that results count each once."""
    for theirs in mesh.gather(dict(source.broken)):
        source.broken.update(theirs)


def _prefetch(
    task: Task, source: Source, batches: Iterable[tuple[list[int], bool]]
) -> Iterator[tuple[Batch, bool]]:
    """Batches, loaded in the background while earlier ones are scored."""

    def build(ids: list[int]) -> Batch:
        longest = float(source.lengths[ids].max())
        return task.collate([source.load(i) for i in ids], None, longest).identified(ids)

    with ThreadPoolExecutor(PREFETCH, thread_name_prefix="score") as pool:
        pending: deque[tuple[Future[Batch], bool]] = deque()
        for ids, counted in batches:
            pending.append((pool.submit(build, ids), counted))
            if len(pending) > PREFETCH:
                future, counts = pending.popleft()
                yield future.result(), counts
        for future, counts in pending:
            yield future.result(), counts


def _rank_batches(
    source: Source,
    windows: Lengths | None,
    mesh: Mesh,
    batch_size: int,
    chosen: NDArray[np.int64],
) -> Iterator[tuple[list[int], bool]]:
    """This rank's batches of the chosen samples, and whether each counts.

    Where a forward pass has collectives, ranks with fewer batches repeat one that does not count, so
    that every rank joins every collective.
    """
    shards = eval_shards(
        source.lengths[chosen],
        None if windows is None else windows[chosen],
        mesh.layout.data_ranks,
        batch_size,
        None if source.groups is None else source.groups[chosen],
    )
    mine = shards[mesh.data_rank]
    yield from ((chosen[ids].tolist(), True) for ids in mine)
    if mesh.layout.collective_forward:
        for _ in range(max(map(len, shards)) - len(mine)):
            yield [int(chosen[0])], False
