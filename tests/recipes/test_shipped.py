"""The recipes that ship build, and train on real speech where some lies beside the checkout."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from muster.parallel.mesh import Mesh
from muster.recipe.load import list_recipes, load
from muster.tasks import build_task
from muster.training.evaluate import evaluate
from muster.training.loop import train
from real import FSDD, WHISPER, needs_speech, needs_whisper
from speech_encoders import make, write
from training import make_job, run_training

NEEDED = {  # recipes without data of their own
    "fsdd": ["data.train=embedded:spoken-numbers"],
    "mnist": ["data.train=embedded:digits"],
    "resnet18": ["data.train=embedded:digits"],
    "wav2vec2": ["data.train=embedded:spoken-numbers"],
    "whisper": ["data.train=embedded:spoken-numbers", f"model.pretrained={WHISPER}"],
}
MARKS = {"whisper": (needs_whisper, pytest.mark.guides)}


ELSEWHERE = ("chat",)  # tests/tasks/test_chat_lm.py


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=MARKS.get(name, ()))
        for name, _ in list_recipes()
        if name not in ELSEWHERE
    ],
)
def test_a_shipped_recipe_builds_its_model_and_finds_its_data(name, tmp_path):
    needed = NEEDED.get(name, [])
    if name == "wav2vec2":
        needed = [*needed, f"model.pretrained={write(make('hubert', hidden_size=240), tmp_path)}"]
    task = build_task(load(name, needed))
    with torch.device("meta"):
        model = task.build_model()
    assert sum(p.numel() for p in model.parameters()) > 100_000
    assert len(task.source("train")) > 1000


@pytest.mark.guides
@needs_speech
def test_real_digits_at_8_khz_train(ranks, tmp_path):
    overrides = ["training.steps=12", "training.warmup_steps=4", f"data.train={FSDD}"]
    lines = ranks(2)(run_training, str(tmp_path), overrides)[0]
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    assert lines[0]["audio_s_per_s"] > 0


def some_digits(folder: Path, per_split: dict[str, int]) -> Path:
    """Clips of every digit and speaker, evenly picked; train and test speakers differ."""
    import pyarrow.parquet as pq

    for split, count in per_split.items():
        table = pq.read_table(FSDD / f"{split}.parquet")
        rows = list(range(0, len(table), len(table) // count))
        pq.write_table(table.take(rows), folder / f"{split}.parquet")
    return folder


def score(mesh: Mesh, folder: str, overrides: list[str], steps: int) -> float:
    """The word error rate on the test split, after `steps` steps."""
    job = make_job(mesh, folder, [*overrides, f"training.steps={max(1, steps)}"], recipe="whisper")
    if steps:
        train(job)
    result = evaluate(job.task, job.engine, "test", mesh, 10, nullcontext)
    job.observer.close()
    return result.scores["wer"]


@pytest.mark.full  # a minute and a half
@needs_speech
@needs_whisper
def test_fine_tuning_whisper_lowers_the_error_rate_on_unseen_speakers(ranks, tmp_path):
    """Digits over a telephone band, which tiny.en gets wrong; after a few steps, in windows as short
    as the clips, it gets them right."""
    overrides = [
        f"model.pretrained={WHISPER}",
        f"data.train={some_digits(tmp_path, {'train': 100, 'test': 40})}",
        "data.spec_augment=null",
        "training.epochs=null",
        "training.global_batch_size=8",
        "training.lr=5e-5",
        "training.warmup_steps=4",
        "evaluation.max_tokens=16",
    ]
    before = ranks(1)(score, str(tmp_path / "before"), [*overrides, "evaluation.window=30"], 0)[0]
    after = ranks(1)(score, str(tmp_path / "after"), overrides, 24)[0]
    assert before > 0.1
    assert after < 0.5 * before
