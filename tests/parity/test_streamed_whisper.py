"""Laws 1 and 2 for Whisper on clips that are streamed by row groups and padded to windows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from muster.checks.parity import TrainingCurve, distance, short_recipe, training_curve
from muster.data.batches import BatchPlan, cut
from muster.data.corpus import embedded_folder
from muster.recipe.load import load
from muster.recipe.schema import Recipe
from muster.tasks.speech_seq2seq import SpeechSeq2Seq

CLIPS, ROWS_PER_GROUP, BATCH = 60, 5, 9  # 6 steps an epoch, some clips of which it leaves out
STEPS, SAVED = 8, 3  # stopped in the first epoch, ended in the second


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    source = sorted(embedded_folder("spoken-numbers").glob("train-*.parquet"))[0]
    table = pq.read_table(source).slice(0, CLIPS)
    pq.write_table(table, folder / "train.parquet", row_group_size=ROWS_PER_GROUP)
    return folder


def recipe_on(clips: str) -> Recipe:
    return load(
        "whisper-micro",
        short_recipe(
            [
                f"data.train={clips}",
                "data.shuffle=groups",
                "data.window=bucket",
                "data.buckets=6",
                "data.pool_batches=1",
                "data.spec_augment={freq_masks: 2, time_masks: 2}",
                f"training.steps={STEPS}",
                f"training.global_batch_size={BATCH}",
                "training.lr=3e-4",
                f"checkpoint.every_steps={SAVED}",
            ]
        ),
    )


def train_on(mesh, folder: str, clips: str) -> TrainingCurve | None:
    made = training_curve(recipe_on(clips), mesh, Path(folder))
    return made if mesh.first else None


@pytest.fixture(scope="module")
def straight(ranks, clips, tmp_path_factory):
    """The unbroken run on so many ranks, with a checkpoint in its middle: its course and folder."""
    kept = {}

    def run(world: int) -> tuple[TrainingCurve, Path]:
        if world not in kept:
            folder = tmp_path_factory.mktemp("straight")
            kept[world] = ranks(world)(train_on, str(folder), str(clips))[0], folder
        return kept[world]

    return run


def go_on(ranks, straight, clips, folder: Path, before: int, after: int) -> TrainingCurve:
    """Only the checkpoint in the middle goes along."""
    middle = Path("checkpoints", f"step-{SAVED}")
    shutil.copytree(straight(before)[1] / middle, folder / middle)
    return ranks(after)(train_on, str(folder), str(clips))[0]


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(1, 2, marks=pytest.mark.guides), pytest.param(2, 1, marks=pytest.mark.full)],
)
def test_streamed_clips_in_windows_go_on_at_the_same_sample_on_another_world(
    ranks, straight, clips, tmp_path, record_property, before, after
):
    reference = straight(1)[0]
    went_on = go_on(ranks, straight, clips, tmp_path, before, after)
    tail = TrainingCurve(reference.losses[SAVED:], reference.norms[SAVED:], reference.weights)
    found = distance(tail, went_on)
    record_property("row", f"| {before} | {after} | {found}")
    assert len(went_on.losses) == STEPS - SAVED
    assert found.small, found


def test_the_clips_are_streamed_and_windows_differ_among_the_clips_of_a_batch(clips):
    """Or the test above shows nothing: a rank must not pad to its own longest clip."""
    task = SpeechSeq2Seq(recipe_on(str(clips)))
    source = task.source("train")
    assert source is not None
    assert source.groups is not None
    assert len(set(source.groups.tolist())) == CLIPS // ROWS_PER_GROUP
    windows = task.windows(source.lengths, training=True)
    plan = BatchPlan(source.lengths, BATCH, task.recipe.seed, 1, source.groups, windows)
    assert plan.epoch_of(SAVED) < plan.epoch_of(STEPS - 1)
    shares = [cut(plan.batch(step), source.lengths, 2, 1) for step in range(SAVED, STEPS)]
    assert any(windows[one].max() != windows[other].max() for (one,), (other,) in shares)
