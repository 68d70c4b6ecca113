"""Speech encoders of transformers on two ranks: the course of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

import few_clips
import speech_encoders
from muster.checks.parity import (
    ROWS,
    TOLERANCE,
    CurveDistance,
    TrainingCurve,
    distance,
    short_recipe,
    training_curve,
)
from muster.parallel.mesh import Mesh
from muster.recipe.load import load

STRATEGIES = {row.name: row.options for row in ROWS if not row.transformers_only}
ORDINARY = {("ddp", "wav2vec2-group"), ("fsdp", "wavlm")}


def fine_tune(
    mesh: Mesh, folder: str, pretrained: str, options: list[str], accumulation: int
) -> TrainingCurve | None:
    overrides = [
        "training.steps=3",
        f"model.pretrained={pretrained}",
        f"data.train={few_clips.folder()}",
        "evaluation.decoder=greedy",
        "evaluation.ngram=null",
        "evaluation.known_words=false",
        "training.global_batch_size=10",
        "training.lr=3e-4",
        f"training.gradient_accumulation_steps={accumulation}",
        *options,
    ]
    made = training_curve(load("speech", short_recipe(overrides)), mesh, Path(folder))
    return made if mesh.first else None


@pytest.fixture(scope="module")
def course(ranks, tmp_path_factory):
    kept: dict[tuple[object, ...], TrainingCurve] = {}

    def run(kind: str, world: int, options: tuple[str, ...] = (), accumulation: int = 1):
        key = (kind, world, options, accumulation)
        if key not in kept:
            pretrained = tmp_path_factory.getbasetemp() / kind
            if not pretrained.exists():
                speech_encoders.write(speech_encoders.make(kind), pretrained)
            folder = str(tmp_path_factory.mktemp("row"))
            given = (folder, str(pretrained), list(options), accumulation)
            kept[key] = ranks(world)(fine_tune, *given)[0]
        return kept[key]

    return run


# In float32 the gradients of these random models are off by 2e-5 of those in float64, by which two halves of a
# batch have the norm of the whole exactly.
NORM_TOLERANCE = 5e-5


def agree(found: CurveDistance) -> bool:
    return max(found.loss, found.weights) < TOLERANCE and found.norm < NORM_TOLERANCE


def cells():
    for name in STRATEGIES:
        for kind in speech_encoders.KINDS:
            marks = [] if (name, kind) in ORDINARY else [pytest.mark.full]
            yield pytest.param(name, kind, marks=marks, id=f"{name}-{kind}")


@pytest.mark.parametrize(("strategy", "kind"), list(cells()))
def test_fine_tuning_on_several_ranks_has_the_course_of_one_process(course, strategy, kind):
    """Padding enters the group norm and an unmasked model's attention: as far as the longest clip of
    the global batch, however that is split."""
    world = 4 if strategy == "hsdp" else 2
    found = distance(course(kind, 1), course(kind, world, STRATEGIES[strategy], 2))
    assert agree(found), found


OPTIONS = {
    "activation checkpointing": "training.activation_checkpointing=full",
    "selective checkpointing": "training.activation_checkpointing=selective",
    "only the head": "model.freeze_encoder=true",
    "all of it": "model.freeze_feature_encoder=false",
    "no masks": "data.spec_augment=null",
    "subwords": "data.tokenizer.kind=subwords",
}


@pytest.mark.full
@pytest.mark.parametrize("option", list(OPTIONS.values()), ids=list(OPTIONS))
@pytest.mark.parametrize("kind", ["wav2vec2-layer", "wavlm", "wav2vec2-bert"])
def test_options_have_the_course_of_one_process(course, kind, option):
    recomputes = "checkpointing" in option
    alone = course(kind, 1, () if recomputes else (option,))
    for strategy in ("ddp", "fsdp"):
        found = distance(alone, course(kind, 2, (*STRATEGIES[strategy], option)))
        assert agree(found), found
