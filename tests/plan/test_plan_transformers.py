"""Models that transformers builds are planned from their own recording, as all others."""

from __future__ import annotations

from pathlib import Path

import pytest

import hf_families
from muster.parallel.layout import Layout
from muster.planner.memory import Choice
from plan.subjects import planner, subject

FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("family", "compiled"),
    [
        ("gemma3_text", "false"),
        pytest.param("gemma3_text", "true", marks=FULL),
        pytest.param("mixtral", "false", marks=FULL),
        pytest.param("mixtral", "true", marks=FULL),
    ],
)
def test_a_family_is_planned(family: str, compiled: str, tmp_path: Path):
    hf_families.save(family, tmp_path / family, num_hidden_layers=4, layer_types=None)
    thing = subject(
        "gpt-micro",
        f"model.pretrained={tmp_path / family}",
        "data.tokenizer.kind=bytes",
        "data.sequence_length=64",
        "training.global_batch_size=64",
        f"training.compile={compiled}",
    )
    parts = planner(thing, gpus=2).evaluate(Choice(Layout(shard=2), "bf16", rows=4)).memory.parts
    assert parts["weights"] == pytest.approx(4 * thing.parameters / 2, rel=0.05)
    assert parts["activations"] > 0
