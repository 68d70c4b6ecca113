"""Law 2: a checkpoint of any layout continues under any other, at the same sample."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from muster.checks.parity import (
    TOLERANCE,
    WEIGHT_TOLERANCE,
    CurveDistance,
    TrainingCurve,
    distance,
    short_recipe,
    training_curve,
)
from muster.recipe.load import load
from parity.table import RECIPES, overrides_for
from pool import RankError

STEPS, SAVED = 4, 2
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "alone": (1, ()),
    "ddp 2": (2, ("distributed.strategy=ddp",)),
    "fsdp 2": (2, ("distributed.strategy=fsdp",)),
    "fsdp 4": (4, ("distributed.strategy=fsdp",)),
    # on_oom=shrink tries the costliest batch first, and discards its gradients, as on a GPU.
    "zero3 2": (2, ("distributed.strategy=zero3", "training.on_oom=shrink")),
    "context 2 × fsdp 2": (4, ("distributed.strategy=fsdp", "distributed.context=2")),
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
ORDINARY = {("ddp 2", "fsdp 2"), ("zero3 2", "alone")}
ORDINARY |= {("fsdp 2", "fsdp 2"), ("fsdp 2", "context 2 × fsdp 2")}
ON_GPUS = ORDINARY | {
    ("fsdp 2", "zero3 2"),
    ("context 2 × fsdp 2", "fsdp 4"),
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


OPTIMIZERS = [
    ("muon", "fsdp 2", "fsdp 2", pytest.mark.full),
    ("muon", "fsdp 2", "tensor 2 × pipeline 2", pytest.mark.full),
    ("muon", "tensor 2 × pipeline 2", "alone", pytest.mark.full),
    ("muon", "fsdp 2", "alone", ()),
    ("adamw-8bit", "fsdp 2", "fsdp 2", ()),
    ("adamw-8bit", "fsdp 2", "alone", ()),
    ("adamw-8bit", "ddp 2", "fsdp 4", pytest.mark.full),
    ("adafactor", "fsdp 2", "fsdp 2", pytest.mark.full),
    ("adafactor", "fsdp 2", "alone", ()),
    ("adafactor", "tensor 2 × pipeline 2", "fsdp 4", pytest.mark.full),
    ("sgd", "zero3 2", "fsdp 2", pytest.mark.full),
    ("sgd", "fsdp 2", "zero3 2", pytest.mark.full),
]
# Muon rounds to bfloat16 and 8-bit blocks begin elsewhere in other shards: another layout rounds
# otherwise, by this much in a few steps.
ROUNDED = {"muon": 1e-4, "adamw-8bit": 2e-3}


@pytest.mark.parametrize(
    ("optimizer", "saver", "loader"),
    [pytest.param(o, s, x, marks=m) for o, s, x, m in OPTIMIZERS],
)
def test_every_optimizer_continues_under_any_layout(
    ranks, small_corpus, tmp_path, record_property, optimizer, saver, loader
):
    """Against the same run that was never stopped, under the layout it was saved by."""
    if optimizer == "adamw-8bit":
        pytest.importorskip("torchao")
    if "zero3 2" in (saver, loader):
        pytest.importorskip("deepspeed")
    asked = [f"training.optimizer={optimizer}", f"training.lr={RATES.get(optimizer, 1e-3)}"]
    if optimizer in ("sgd", "adafactor"):  # the recipe is for AdamW
        asked.append("~training.betas")
    if optimizer == "adamw-8bit":  # shards of 4,096 elements and more
        asked.append("model.preset=gpt-wide")
    folders = tmp_path / "straight", tmp_path / "continued"
    made = []
    for folder, name in zip(folders, (saver, loader), strict=True):
        if made:
            middle = Path("checkpoints", f"step-{SAVED}")
            shutil.copytree(folders[0] / middle, folder / middle)
        world, options = LAYOUTS[name]
        arguments = (str(folder), small_corpus, [*asked, *options])
        made.append(ranks(world)(train_on, *arguments)[0])
    straight, went_on = made
    tail = TrainingCurve(straight.losses[SAVED:], straight.norms[SAVED:], straight.weights)
    if saver == loader:
        assert (went_on.losses, went_on.norms) == (tail.losses, tail.norms)
        assert all(torch.equal(went_on.weights[n], w) for n, w in straight.weights.items())
        return
    found = distance(tail, went_on)
    record_property("row", f"| {optimizer}: {saver} | {loader} | {found}")
    allowed = ROUNDED.get(optimizer, TOLERANCE)
    assert max(found.loss, found.norm) < allowed, found
    assert found.weights < max(allowed, WEIGHT_TOLERANCE), found


RATES = {"sgd": 0.1, "adafactor": 1e-2}


def test_another_optimizer_is_refused_before_anything_is_loaded(
    ranks, straight, small_corpus, tmp_path
):
    middle = Path("checkpoints", f"step-{SAVED}")
    shutil.copytree(straight("ddp 2")[1] / middle, tmp_path / middle)
    with pytest.raises(
        RankError, match=r"trained with training\.optimizer='adamw'.* 'muon'|optimizer='muon'"
    ):
        ranks(2)(train_on, str(tmp_path), small_corpus, ["training.optimizer=muon"])


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
