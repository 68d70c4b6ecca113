"""The parity table: every strategy against one process, step by step.

A row trains the same recipe for a few steps under one layout. Its losses, gradient norms and final
weights must be those of a single process, up to the rounding of float32: a strategy only decides
where the work runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster import run_directory
from muster.observe.results import read_lines
from muster.parallel.engine import full_tensor
from muster.parallel.mesh import Mesh
from muster.recipe.schema import Recipe
from muster.training.job import Job
from muster.training.loop import train
from muster.worker.prepare import prepare

# Another order of the same float32 sums moves a gradient norm by about 1e-7. Each optimizer step
# builds on the last, and AdamW divides by the root of a small average, so differences grow a little
# with every step; measured rows stay near 1e-6.
TOLERANCE = 1e-5
# Where a gradient is nearly zero, AdamW turns its rounding into a step of up to the learning rate.
# A few such weights differ visibly; the distance of all weights together stays small.
WEIGHT_TOLERANCE = 1e-4


@dataclass(frozen=True)
class StrategyRow:
    """One way of splitting the work."""

    name: str
    options: tuple[str, ...]
    worlds: tuple[int, ...]  # of the table
    transformers_only: bool = False  # splits layers or their matrices
    decoders_only: bool = False  # splits sequences of tokens
    multiple: int = 1  # of which a world must be one


def _strategy(name: str, *sizes: str) -> tuple[str, ...]:
    return (f"distributed.strategy={name}", *(f"distributed.{size}" for size in sizes))


ROWS = (
    StrategyRow("ddp", _strategy("ddp"), (2, 4)),
    StrategyRow("fsdp", _strategy("fsdp"), (2, 4)),
    StrategyRow("fsdp shard_grad_op", _strategy("fsdp", "fsdp.sharding=shard_grad_op"), (2, 4)),
    StrategyRow("hsdp", _strategy("hsdp", "replicate=2"), (4,), multiple=4),
    StrategyRow("zero1", _strategy("zero1"), (2, 4)),
    StrategyRow("zero2", _strategy("zero2"), (2, 4)),
    StrategyRow("zero3", _strategy("zero3"), (2, 4)),
    StrategyRow("tensor", _strategy("tensor"), (2, 4), True),
    StrategyRow(
        "tensor, plain",
        _strategy(
            "tensor", "tensor_options.sequence_parallel=false", "tensor_options.loss_parallel=false"
        ),
        (2,),
        True,
    ),
    StrategyRow("pipeline 1f1b", _strategy("pipeline"), (2, 4), True),
    StrategyRow(
        "pipeline gpipe", _strategy("pipeline", "pipeline_options.schedule=gpipe"), (2,), True
    ),
    StrategyRow(
        "pipeline interleaved",
        _strategy("pipeline", "pipeline_options.schedule=interleaved"),
        (2, 4),
        True,
    ),
    StrategyRow(
        "pipeline zero-bubble",
        _strategy("pipeline", "pipeline_options.schedule=zero-bubble"),
        (2,),
        True,
    ),
    StrategyRow("tensor × ddp", _strategy("tensor", "tensor=2"), (4,), True, multiple=4),
    StrategyRow("tensor × fsdp", _strategy("hybrid", "tensor=2"), (4,), True, multiple=4),
    StrategyRow("pipeline × fsdp", _strategy("hybrid", "pipeline=2"), (4,), True, multiple=4),
    StrategyRow(
        "tensor × pipeline", _strategy("hybrid", "tensor=2", "pipeline=2"), (4,), True, multiple=4
    ),
    StrategyRow(
        "tensor × pipeline × fsdp",
        _strategy("hybrid", "tensor=2", "pipeline=2"),
        (8,),
        True,
        multiple=8,
    ),
    StrategyRow("context", _strategy("context"), (2, 4), True, True),
    StrategyRow("context × ddp", _strategy("ddp", "context=2"), (2, 4), True, True, 2),
    StrategyRow("context × fsdp", _strategy("fsdp", "context=2"), (4, 8), True, True, 4),
    StrategyRow("context × hsdp", _strategy("hsdp", "context=2"), (4, 8), True, True, 4),
    StrategyRow(
        "context × tensor", _strategy("hybrid", "context=2", "tensor=2"), (4,), True, True, 4
    ),
)


@dataclass(frozen=True)
class TrainingCurve:
    """Losses, gradient norms and final weights of a short training."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class CurveDistance:
    """The largest relative difference between two training curves."""

    loss: float
    norm: float
    weights: float

    def __str__(self) -> str:
        return f"{self.loss:.1e} | {self.norm:.1e} | {self.weights:.1e}"

    @property
    def small(self) -> bool:
        return max(self.loss, self.norm) < TOLERANCE and self.weights < WEIGHT_TOLERANCE


def distance(one: TrainingCurve, other: TrainingCurve) -> CurveDistance:
    if set(one.weights) != set(other.weights):
        odd = sorted(set(one.weights) ^ set(other.weights))
        raise ValueError(f"the training curves have different weights: {', '.join(odd[:5])}")
    apart = sum(float((one.weights[n] - other.weights[n]).square().sum()) for n in one.weights)
    size = sum(float(w.square().sum()) for w in one.weights.values())
    return CurveDistance(
        _relative(one.losses, other.losses),
        _relative(one.norms, other.norms),
        (apart / size) ** 0.5,
    )


def _relative(one: Sequence[float], other: Sequence[float]) -> float:
    a, b = torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)
    if a.shape != b.shape or not (a.isfinite().all() and b.isfinite().all()):
        return float("inf")
    return float(((a - b).abs() / a.abs()).max())


def training_curve(recipe: Recipe, mesh: Mesh, folder: Path) -> TrainingCurve:
    """Train to the end, as a worker does, in a run directory that is thrown away."""
    run = run_directory.Run(folder)
    if mesh.first:
        (run.path / "ranks").mkdir(parents=True, exist_ok=True)
    mesh.barrier()
    job = prepare(recipe, mesh, run)
    train(job)
    job.observer.close()
    weights = whole_weights(job)
    mesh.barrier()
    lines = read_lines(folder / "metrics.jsonl")
    return TrainingCurve([x["loss"] for x in lines], [x["grad_norm"] for x in lines], weights)


def whole_weights(job: Job) -> dict[str, Tensor]:
    """Every parameter by name, gathered from all ranks, on every rank. For small models."""
    mine = {name: full_tensor(t).cpu() for name, t in job.engine.state()["model"].items()}
    found: dict[str, Tensor] = {}
    for theirs in job.mesh.gather(mine) if job.mesh.layout.pipeline > 1 else [mine]:
        found |= theirs
    return found


def cause(alone: TrainingCurve, made: TrainingCurve, ranks: int) -> str:
    """What the difference in the first step, before any update, says of its cause."""
    if not (alone.losses and made.losses and alone.losses[0]):
        return "no losses to compare"
    loss, norm = made.losses[0] / alone.losses[0], made.norms[0] / (alone.norms[0] or 1.0)
    same = abs(loss - 1) < TOLERANCE
    if abs(loss - ranks) < 0.2 * ranks and abs(norm - ranks) < 0.2 * ranks:
        return (
            f"the loss is {loss:.2f} times that of one process, on {ranks} ranks: `loss` returns a mean over "
            "its micro-batch; return the sum over the batch's units (reduction='sum')"
        )
    if not same:
        return (
            f"the first loss is {loss:.4f} times that of one process: a sample's loss depends on what else is "
            "in its micro-batch (batch normalisation, negatives from the batch, a mean), or on the rank "
            "(dropout, random numbers that do not follow (seed, epoch, sample))"
        )
    if abs(norm - 1) > TOLERANCE:
        return (
            f"the first loss agrees and the gradient norm is {norm:.4f} times that of one process: part of "
            "the gradient is not summed over ranks (a detached or custom backward pass, a scaled loss)"
        )
    return "the first step agrees and later ones do not: something besides weights changes from step to step"


def rows_for(world: int, rows: Iterable[StrategyRow] = ROWS) -> list[StrategyRow]:
    """The layouts that `world` ranks allow; a 3-D layout covers its 2-D one."""
    found = [row for row in rows if world % row.multiple == 0]
    return [row for row in found if row.name != "tensor × pipeline" or world % 8]


def short_recipe(overrides: Sequence[str]) -> list[str]:
    """Overrides that make any recipe a short, exactly repeatable one."""
    return [
        "training.steps=5",
        "training.precision=fp32",
        "training.warmup_steps=2",
        "checkpoint.every_steps=null",
        "checkpoint.final=false",
        "evaluation.every_steps=null",
        "evaluation.final=false",
        "logging.to=[]",
        *overrides,
    ]


def result_line(name: str, world: int, found: CurveDistance) -> dict[str, Any]:
    return {"strategy": name, "ranks": world, **vars(found), "agrees": found.small}
