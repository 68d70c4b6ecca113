"""The recipes that ship build, and train on real speech where some lies beside the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from muster.recipe.load import list_recipes, load
from muster.tasks import build_task
from training import run_training

FSDD = Path(__file__).parents[3] / "shared" / "data" / "fsdd"
NEEDED = {  # recipes without data of their own
    "fsdd": ["data.train=embedded:spoken-numbers"],
    "mnist": ["data.train=embedded:digits"],
    "resnet18": ["data.train=embedded:digits"],
}


@pytest.mark.parametrize("name", [name for name, _ in list_recipes()])
def test_a_shipped_recipe_builds_its_model_and_finds_its_data(name):
    task = build_task(load(name, NEEDED.get(name, [])))
    with torch.device("meta"):
        model = task.build_model()
    assert sum(p.numel() for p in model.parameters()) > 100_000
    assert len(task.source("train")) > 1000


@pytest.mark.skipif(not FSDD.is_dir(), reason=f"needs spoken digits in {FSDD}")
def test_real_digits_at_8_khz_train(ranks, tmp_path):
    overrides = ["training.steps=12", "training.warmup_steps=4", f"data.train={FSDD}"]
    lines = ranks(2)(run_training, str(tmp_path), overrides)[0]
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    assert lines[0]["audio_s_per_s"] > 0
