"""Before the first step of a user's own task: two samples through each of its methods.

Mistakes show here as one sentence that names the method, on every rank at once, and not as a wrong
curve: above all a loss that is a mean.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from muster.data.loader import Batch, Source
from muster.errors import RecipeError
from muster.parallel.engine import Engine, full_tensor
from muster.parallel.mesh import Mesh
from muster.recipe.own_task import OwnTask
from muster.tasks.base import Task
from muster.tasks.own import named

SAMPLES = 2
# A sum over twice the samples is twice as large, a mean stays the same up to the rounding of bf16.
SAME = 5e-3


@torch.no_grad()
def try_task(
    own: OwnTask,
    task: Task,
    engine: Engine,
    source: Source,
    mesh: Mesh,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Refuses batches without units, a loss that is no scalar, and one that is a mean. All ranks compute
    the same, so a model in shards can be tried too; weights, buffers and random state stay as they are."""
    _refuse_other_state(own, engine)
    ids = list(range(min(SAMPLES, len(source))))
    once, twice = (_batch(own, task, source, chosen) for chosen in (ids, ids + ids))
    if twice.units != 2 * once.units:
        raise RecipeError(
            f"{own.label}: collate gave {once.units} units for {len(ids)} samples and {twice.units} for the "
            "same ones twice; `units` counts what `loss` sums over, such as samples or tokens"
        )
    for part in engine.parts:
        part.eval()
    with torch.random.fork_rng([mesh.device] if mesh.device.type == "cuda" else []):
        of_once, of_twice = (_loss(own, task, engine, mesh, b, autocast) for b in (once, twice))
    for part in engine.parts:
        part.train()
    if of_once is not None and of_twice is not None:
        _refuse_mean(own, float(of_once), float(of_twice), once.units)


def _refuse_other_state(own: OwnTask, engine: Engine) -> None:
    """A checkpoint holds tensors, and no reading of one runs code: other values would not come back."""
    for part in engine.parts:
        for name, value in part.state_dict().items():
            if not isinstance(value, Tensor):
                raise RecipeError(
                    f"{own.label}: the model's state has {name}, a {type(value).__name__}; checkpoints keep tensors "
                    "alone: register_buffer keeps numbers, and what a constructor sets needs no get_extra_state"
                )


def _batch(own: OwnTask, task: Task, source: Source, ids: list[int]) -> Batch:
    with named(own, "source"):
        samples = [source.load(i) for i in ids]
        longest = float(source.lengths[ids].max())
    with named(own, "collate"):
        batch = task.collate(samples, None, longest)
    problem = None
    if not isinstance(batch, Batch):
        problem = f"a {type(batch).__name__}, expected a muster.Batch"
    elif not batch.tensors or not all(isinstance(t, Tensor) for t in batch.tensors.values()):
        problem = "a Batch whose `tensors` are not tensors by name: tensors={'name': tensor, …}"
    elif not isinstance(batch.units, int) or batch.units < 1:
        problem = (
            f"a Batch with units={batch.units!r}, expected a whole number above 0: how many samples, "
            "tokens … the summed loss is divided by"
        )
    elif any(t.device.type != "cpu" for t in batch.tensors.values()):
        problem = "tensors that are not on the CPU; muster moves them to the device"
    if problem:
        raise RecipeError(f"{own.label}: collate returned {problem}")
    return batch.identified(ids)


def _loss(
    own: OwnTask,
    task: Task,
    engine: Engine,
    mesh: Mesh,
    batch: Batch,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Tensor | None:
    """None on a rank that holds no output."""
    with named(own, "prepare"):
        batch = task.prepare(batch.to(mesh.device))
    with named(own, "inputs"):
        inputs = task.inputs(batch)
    with autocast():
        with named(own, "the model's forward"):
            output = engine.forward(inputs)
        if output is None:
            return None
        with named(own, "loss"):
            loss = full_tensor(task.loss(output, batch))
    if not isinstance(loss, Tensor) or loss.dim() > 0:
        what = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise RecipeError(
            f"{own.label}: loss returned {what}, expected a scalar tensor, summed over the batch's units"
        )
    with autocast(), named(own, "score"):
        score = task.score(output, batch)
    _check_score(own, task, score)
    return loss


def _check_score(own: OwnTask, task: Task, score: Any) -> None:
    counts = getattr(score, "counts", None)
    if not (isinstance(counts, dict) and all(isinstance(c, int | float) for c in counts.values())):
        raise RecipeError(
            f"{own.label}: score returned {score!r:.80}, expected a muster.Score whose counts are numbers"
        )
    with named(own, "summarise"):
        found = task.summarise(counts)
    if missing := [name for name in task.facts.scores if name not in found]:
        raise RecipeError(
            f"{own.label}: scores declares {missing[0]!r}, which summarise does not return: it returned "
            f"{', '.join(found) or 'nothing'}"
        )


def _refuse_mean(own: OwnTask, once: float, twice: float, units: int) -> None:
    if abs(once) > 1e-6 and abs(twice - once) <= SAME * abs(once):
        raise RecipeError(
            f"{own.label}: loss is a mean: {once:.6g} for {units} units, and {twice:.6g} for the same ones "
            "twice. Return the sum over the batch's units (reduction='sum'): muster divides once, by the "
            "units of the whole global batch"
        )
