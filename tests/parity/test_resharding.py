"""Law 2: a checkpoint of any layout continues under any other, at the same sample."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from muster.check.parity import (
    TOLERANCE,
    CurveDistance,
    TrainingCurve,
    distance,
    short_recipe,
    training_curve,
)
from muster.recipe.load import load
from parity.table import RECIPES, overrides_for

STEPS, SAVED = 4, 2
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "alone": (1, ()),
    "ddp 2": (2, ("distributed.strategy=ddp",)),
    "fsdp 2": (2, ("distributed.strategy=fsdp",)),
    "fsdp 4": (4, ("distributed.strategy=fsdp",)),
    # on_oom=shrink tries the costliest batch first, and discards its gradients, as on a GPU.
    "zero3 2": (2, ("distributed.strategy=zero3", "training.on_oom=shrink")),
    "tensor 2 × pipeline 2": (
        4,
        ("distributed.strategy=hybrid", "distributed.tensor=2", "distributed.pipeline=2"),
    ),
}
SAVERS = [name for name in LAYOUTS if name != "alone"]
INTERLEAVED = "distributed.pipeline_options.schedule=interleaved"
WHISPER = LAYOUTS | {
    "tensor 2": (2, ("distributed.strategy=tensor",)),
    "interleaved 2": (2, ("distributed.strategy=pipeline", INTERLEAVED)),
}
# One back to itself, bit for bit. All pairs, and the 2-D layout, with --full.
ORDINARY = {("ddp 2", "fsdp 2"), ("fsdp 2", "zero3 2"), ("zero3 2", "alone")}
ORDINARY |= {("fsdp 2", "fsdp 2")}
ON_GPUS = ORDINARY | {
    ("zero3 2", "zero3 2"),
    ("ddp 2", "fsdp 4"),
    ("fsdp 4", "tensor 2 × pipeline 2"),
}
ON_GPUS |= {("tensor 2 × pipeline 2", "ddp 2"), ("ddp 2", "ddp 2")}


def marks_of(pair: tuple[str, str]) -> list[pytest.MarkDecorator]:
    return ([pytest.mark.both] if pair in ON_GPUS else []) + (
        [] if pair in ORDINARY else [pytest.mark.full]
    )


def train_on(
    mesh, folder: str, corpus: str, options: list[str], model: str = "gpt"
) -> TrainingCurve | None:
    recipe = load(
        RECIPES[model],
        short_recipe(
            [
                *overrides_for(model, corpus),
                f"training.steps={STEPS}",
                f"checkpoint.every_steps={SAVED}",
                *options,
            ]
        ),
    )
    made = training_curve(recipe, mesh, Path(folder))
    return made if mesh.first else None


@pytest.fixture(scope="module")
def straight(ranks, small_corpus, tmp_path_factory):
    """A layout's uninterrupted run, with a checkpoint in the middle: its course and its folder."""
    kept = {}

    def run(name: str, model: str = "gpt") -> tuple[TrainingCurve, Path]:
        if (name, model) not in kept:
            world, options = WHISPER[name]
            folder = tmp_path_factory.mktemp("straight")
            made = ranks(world)(train_on, str(folder), small_corpus, list(options), model)[0]
            kept[name, model] = (made, folder)
        return kept[name, model]

    return run


def continued(
    ranks, straight, small_corpus, folder: Path, saver: str, loader: str, model: str = "gpt"
) -> TrainingCurve:
    """Only the checkpoint in the middle goes along."""
    middle = straight(saver, model)[1] / "checkpoints" / f"step-{SAVED}"
    shutil.copytree(middle, folder / "checkpoints" / f"step-{SAVED}")
    world, options = WHISPER[loader]
    return ranks(world)(train_on, str(folder), small_corpus, list(options), model)[0]


@pytest.mark.parametrize(
    ("saver", "loader"),
    [pytest.param(s, x, marks=marks_of((s, x))) for s in SAVERS for x in LAYOUTS],
)
def test_a_checkpoint_continues_under_any_layout(
    ranks, straight, small_corpus, tmp_path, record_property, saver, loader
):
    went_on = continued(ranks, straight, small_corpus, tmp_path, saver, loader)
    found = assert_continued(straight, went_on, saver, loader, "gpt")
    record_property("row", f"| {saver} | {loader} | {found}")


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        pytest.param("interleaved 2", "tensor 2", marks=pytest.mark.full),
        pytest.param("tensor 2", "interleaved 2", marks=pytest.mark.full),
        pytest.param("interleaved 2", "interleaved 2", marks=pytest.mark.full),
        pytest.param("fsdp 2", "interleaved 2", marks=pytest.mark.full),
        pytest.param("interleaved 2", "alone", marks=pytest.mark.full),
        pytest.param("interleaved 2", "tensor 2 × pipeline 2", marks=pytest.mark.full),
        pytest.param("tensor 2 × pipeline 2", "zero3 2", marks=pytest.mark.full),
        pytest.param("tensor 2", "tensor 2", marks=pytest.mark.full),
    ],
)
def test_whisper_continues_under_any_layout(
    ranks, straight, small_corpus, tmp_path, record_property, saver, loader
):
    model = "whisper-heads"
    went_on = continued(ranks, straight, small_corpus, tmp_path, saver, loader, model)
    found = assert_continued(straight, went_on, saver, loader, model)
    record_property("row", f"| {saver} | {loader} | {found}")


def assert_continued(straight, went_on, saver: str, loader: str, model: str) -> CurveDistance:
    reference = straight("alone", model)[0]
    tail = TrainingCurve(reference.losses[SAVED:], reference.norms[SAVED:], reference.weights)
    found = distance(tail, went_on)
    assert len(went_on.losses) == STEPS - SAVED
    assert found.small, found
    if saver == loader:
        unbroken = straight(saver, model)[0]
        assert went_on.losses == unbroken.losses[SAVED:]
        assert went_on.norms == unbroken.norms[SAVED:]
        assert all(torch.equal(went_on.weights[n], w) for n, w in unbroken.weights.items())
    return found


def test_the_comparison_notices_a_lost_optimizer(ranks, straight, small_corpus, tmp_path):
    """Starting AdamW afresh at the saved weights is what a careless loader does."""
    wrong = ranks(1)(forget_the_averages, str(tmp_path), small_corpus, str(straight("alone")[1]))[0]
    reference = straight("alone")[0]
    tail = TrainingCurve(reference.losses[SAVED:], reference.norms[SAVED:], reference.weights)
    found = distance(tail, wrong)
    assert found.loss > 10 * TOLERANCE


def forget_the_averages(mesh, folder: str, corpus: str, saved: str) -> TrainingCurve | None:
    from muster.parallel.engine import TorchEngine

    shutil.copytree(
        Path(saved, "checkpoints", f"step-{SAVED}"), Path(folder, "checkpoints", f"step-{SAVED}")
    )
    right = TorchEngine.load_state

    def wrong(self, loaded):
        right(self, loaded)
        for held in self.optimizer.state.values():
            held["exp_avg"].zero_()
            held["exp_avg_sq"].zero_()

    TorchEngine.load_state = wrong
    try:
        return train_on(mesh, folder, corpus, [])
    finally:
        TorchEngine.load_state = right
