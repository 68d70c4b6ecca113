"""Laws 1 and 2 for packed text whose documents and cuts change with the epoch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import tiny
from muster.checks.parity import TrainingCurve, distance, short_recipe, training_curve
from muster.recipe.load import load
from muster.recipe.schema import Recipe
from muster.tasks import build_task

STEPS, SAVED, BATCH = 7, 2, 9  # stopped in the first epoch, ended in the third


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    tiny.write(folder)
    lines = (folder / "train.txt").read_text()[:7000]
    for number, part in enumerate(lines.split("\n\n")):
        if part.strip():
            (folder / f"train-{number}.txt").write_text(part)
    (folder / "train.txt").unlink()
    return folder


def recipe_on(text: str, *more: str) -> Recipe:
    shape = ["layers=1", "width=32", "heads=2"]
    return load(
        "gpt-micro",
        short_recipe(
            [
                f"data.train={text}",
                "data.sequence_length=256",
                *(f"model.shape.{size}" for size in shape),
                f"training.steps={STEPS}",
                f"training.global_batch_size={BATCH}",
                f"checkpoint.every_steps={SAVED}",
                *more,
            ]
        ),
    )


def train_on(mesh, folder: str, text: str, *more: str) -> TrainingCurve | None:
    made = training_curve(recipe_on(text, *more), mesh, Path(folder))
    return made if mesh.first else None


@pytest.fixture(scope="module")
def straight(ranks, text, tmp_path_factory) -> tuple[TrainingCurve, Path]:
    folder = tmp_path_factory.mktemp("straight")
    return ranks(1)(train_on, str(folder), str(text))[0], folder


def test_the_run_goes_through_three_epochs_that_differ(text):
    """Or the tests below show nothing."""
    source = build_task(recipe_on(str(text))).source("train")
    assert STEPS > 2 * (len(source) // BATCH) > 2 * SAVED
    cuts = {tuple(source.of_epoch(epoch).load(0).tokens) for epoch in range(3)}
    assert len(cuts) == 3


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_goes_on_at_the_same_sequence_and_over_an_epochs_end(
    ranks, straight, text, tmp_path, world
):
    reference, folder = straight
    middle = Path("checkpoints", f"step-{SAVED}")
    shutil.copytree(folder / middle, tmp_path / middle)
    went_on = ranks(world)(train_on, str(tmp_path), str(text))[0]
    tail = TrainingCurve(reference.losses[SAVED:], reference.norms[SAVED:], reference.weights)
    assert len(went_on.losses) == STEPS - SAVED
    if world == 1:
        assert went_on.losses == tail.losses
        assert went_on.norms == tail.norms
    found = distance(tail, went_on)
    assert found.small, found


def test_windows_that_do_not_move_are_another_run(ranks, straight, text, tmp_path):
    fixed = ranks(1)(train_on, str(tmp_path), str(text), "data.sequence_packing=fixed")[0]
    assert not distance(straight[0], fixed).small
