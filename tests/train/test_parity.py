"""Law 1: the layout never changes the maths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from training import run_training

# Summing the same float32 gradients in another order moves them by about 1e-7 relative; the padding
# of a micro-batch changes the length of its FFTs, which adds about as much; 8 steps of AdamW let
# both grow.
TOLERANCE = 1e-5
STEPS = 8


def relative_errors(
    one: list[dict[str, Any]], other: list[dict[str, Any]], key: str
) -> torch.Tensor:
    a, b = (
        torch.tensor([line[key] for line in lines], dtype=torch.float64) for lines in (one, other)
    )
    return (a - b).abs() / a.abs()


@pytest.fixture(scope="module")
def train_on(ranks, tmp_path_factory):
    """Metrics of the default recipe for a world, an accumulation and a global batch; kept."""
    kept: dict[tuple[int, int, int], list[dict[str, Any]]] = {}

    def run(world: int, accumulation: int, batch: int) -> list[dict[str, Any]]:
        key = (world, accumulation, batch)
        if key not in kept:
            overrides = [
                f"training.steps={STEPS}",
                f"training.global_batch_size={batch}",
                f"training.gradient_accumulation_steps={accumulation}",
            ]
            folder = tmp_path_factory.mktemp("parity")
            kept[key] = ranks(world)(run_training, str(folder), overrides)[0]
        return kept[key]

    return run


@pytest.mark.parametrize(
    ("world", "accumulation", "batch"),
    [
        pytest.param(1, 4, 16, marks=pytest.mark.full),
        pytest.param(2, 1, 16, marks=pytest.mark.full),
        (2, 1, 15),  # does not divide evenly
        pytest.param(4, 1, 16, marks=pytest.mark.full),
        pytest.param(2, 4, 16, marks=pytest.mark.full),
        pytest.param(4, 4, 16, marks=pytest.mark.full),
        pytest.param(4, 1, 15, marks=pytest.mark.full),
        pytest.param(2, 4, 15, marks=pytest.mark.full),
        pytest.param(3, 1, 16, marks=pytest.mark.full),
        pytest.param(3, 4, 15, marks=pytest.mark.full),
        pytest.param(8, 1, 16, marks=pytest.mark.full),
    ],
)
def test_any_world_size_gives_the_losses_and_gradient_norms_of_one_process(
    train_on, record_property, world, accumulation, batch
):
    alone, together = train_on(1, 1, batch), train_on(world, accumulation, batch)
    assert [line["step"] for line in together] == list(range(1, STEPS + 1))
    assert [line["samples"] for line in together] == [batch] * STEPS
    loss = float(relative_errors(alone, together, "loss").max())
    norm = float(relative_errors(alone, together, "grad_norm").max())
    record_property("row", f"| {world} | {accumulation} | {batch} | {loss:.1e} | {norm:.1e}")
    assert loss < TOLERANCE
    assert norm < TOLERANCE


def broken_normalisation(mesh, folder: str, overrides: list[str]) -> list[dict[str, Any]]:
    """Each rank divides by its own units instead of the global batch's: the usual mistake."""
    from muster.training import loop

    right = loop._accumulate

    def wrong(job, step, micro_batches, units):
        own = sum(b.units for b in micro_batches) * mesh.world
        return right(job, step, micro_batches, own)

    loop._accumulate = wrong
    try:
        return run_training(mesh, folder, overrides)
    finally:
        loop._accumulate = right


def test_the_comparison_catches_a_normalisation_by_rank(ranks, train_on, tmp_path: Path):
    overrides = [f"training.steps={STEPS}", "training.global_batch_size=16"]
    broken = ranks(2)(broken_normalisation, str(tmp_path), overrides)[0]
    assert relative_errors(train_on(1, 1, 16), broken, "grad_norm").max() > 10 * TOLERANCE
