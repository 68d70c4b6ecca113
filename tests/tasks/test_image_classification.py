"""Images in, classes out: the pieces against references, then a run on one rank and on two."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from muster import run_directory
from muster.errors import DataError, RecipeError
from muster.models.resnet import MnistNet, ResNet
from muster.observe.results import read_lines
from muster.recipe.load import load
from muster.tasks import build_task
from muster.tasks.image_classification import ImageClassification
from muster.training.evaluate import evaluate
from muster.training.loop import train
from muster.worker.prepare import prepare

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 40, 40, 3), np.uint8)


def write(path: Path, labels: list[Any], pixels: np.ndarray = PIXELS) -> None:
    cells = []
    for i in range(len(labels)):
        file = io.BytesIO()
        Image.fromarray(pixels[i % len(pixels)]).save(file, "PNG")
        cells.append(file.getvalue())
    pq.write_table(pa.table({"image": pa.array(cells, pa.binary()), "label": labels}), path)


@pytest.fixture
def task(tmp_path):
    """`task("resnet18", {"train": [label, …], …}, "key=value", …)` on parquet files made for it."""

    def make(recipe: str, splits: dict[str, list[Any]], *overrides: str) -> ImageClassification:
        for split, labels in splits.items():
            write(tmp_path / f"{split}.parquet", labels)
        return build_task(load(recipe, [f"data.train={tmp_path}", *overrides]))

    return make


ANIMALS = {"train": ["cat", "dog", "ant", "dog", "cat", "cat"], "test": ["dog", "ant"]}


def test_a_batch_holds_normalised_images_and_the_place_of_each_class(task):
    made = task("resnet18", ANIMALS, "data.image_size=40")
    source = made.source("train")
    batch = made.collate([source.load(i) for i in (4, 2)], 0)
    scaled = torch.from_numpy(PIXELS[[4, 2]]).permute(0, 3, 1, 2) / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = (scaled - mean[:, None, None]) / std[:, None, None]
    torch.testing.assert_close(batch["images"], expected)
    assert batch["labels"].tolist() == [1, 0]
    assert made.classes == ["ant", "cat", "dog"]
    assert (batch.ids, batch.units, batch.filled, batch.cells) == ([4, 2], 2, 2, 2)
    assert made.inputs(made.prepare(batch)).args[0] is batch["images"]


def test_the_loss_is_a_float32_sum_and_scores_are_counts_that_add_up(task):
    from sklearn.metrics import accuracy_score, log_loss

    made = task("resnet18", ANIMALS)
    source = made.source("train")
    logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    parts = [[0, 1, 2, 3], [4, 5]]
    batches = [made.collate([source.load(i) for i in part], None) for part in parts]
    scores = [made.score(logits[p], b) for p, b in zip(parts, batches, strict=True)]
    total = {name: sum(s.counts[name] for s in scores) for name in scores[0].counts}
    truth, guesses = [1, 2, 0, 2, 1, 1], logits.argmax(-1)
    assert made.summarise(total) == pytest.approx(
        {
            "accuracy": accuracy_score(truth, guesses),
            "loss": log_loss(truth, logits.double().softmax(-1), labels=[0, 1, 2]),
            "images": 6,
        }
    )
    loss = made.loss(logits[:4].bfloat16(), batches[0])
    assert loss.dtype == torch.float32
    rounded = logits[:4].bfloat16().double().softmax(-1)
    assert float(loss) == pytest.approx(
        4 * log_loss(truth[:4], rounded, labels=[0, 1, 2]), rel=1e-5
    )
    examples = scores[0].examples + scores[1].examples
    assert [e.id for e in examples] == [0, 1, 2, 3, 4, 5]
    assert [e.reference for e in examples] == ANIMALS["train"]
    assert [e.hypothesis for e in examples] == [["ant", "cat", "dog"][g] for g in guesses]
    assert [e.edits for e in examples] == [int(t != g) for t, g in zip(truth, guesses, strict=True)]


@pytest.mark.parametrize(
    ("recipe", "overrides", "size", "stem"),
    [
        ("resnet18", [], 224, "imagenet"),
        ("resnet18", ["data.image_size=64"], 64, "imagenet"),
        ("resnet18", ["data.image_size=63"], 63, "small"),
        ("mnist", [], 28, None),
        ("mnist", ["data.image_size=16"], 16, None),
    ],
)
def test_the_model_fits_the_images_and_the_classes(task, recipe, overrides, size, stem):
    made = task(recipe, ANIMALS, *overrides)
    assert made.source("train").load(0).pixels.shape == (3, size, size)
    model = made.build_model()
    assert isinstance(model, MnistNet if stem is None else ResNet)
    assert (model.config.classes, model.config.channels) == (3, 3)
    assert getattr(model.config, "stem", None) == stem


def test_the_small_network_takes_digits_as_they_are():
    made = build_task(load("digits", []))
    assert made.source("train").load(0).pixels.shape == (1, 8, 8)
    assert made.source("validation") is None
    assert len(made.source("test")) == 347
    batch = made.collate([made.source("train").load(i) for i in range(1450)], None)
    assert batch["images"].mean() == pytest.approx(0, abs=1e-3)
    assert batch["images"].std() == pytest.approx(1, abs=1e-3)


def test_a_checkpoints_assets_stand_in_for_the_training_data(task, tmp_path):
    made = task("resnet18", ANIMALS, "data.image_size=40")
    assets = json.loads(json.dumps({**made.assets, "data": {"samples": 6}}))
    (tmp_path / "train.parquet").unlink()
    again = build_task(made.recipe, assets)
    assert again.assets == made.assets
    again.build_model().load_state_dict(made.build_model().state_dict())
    assert [again.source("test").load(i).label for i in (0, 1)] == [2, 0]


def test_splits_are_found_beside_the_training_data_or_named(task, tmp_path):
    assert task("resnet18", ANIMALS).source("validation") is None
    elsewhere = tmp_path / "other" / "mine.parquet"
    elsewhere.parent.mkdir()
    write(elsewhere, ["cat"] * 4)
    made = task("resnet18", ANIMALS, f"data.validation={elsewhere}")
    assert len(made.source("validation")) == 4
    assert len(made.source("test")) == 2


def test_only_as_many_training_files_are_read_as_wanted(task):
    splits = {"train-0": ["cat", "dog"], "train-1": ["ape"], "test-0": ["cat"], "test-1": ["dog"]}
    made = task("resnet18", splits, "data.max_parquet_files=1")
    assert made.classes == ["cat", "dog"]
    assert len(made.source("train")) == 2
    assert len(made.source("test")) == 2


def test_a_class_that_only_the_test_data_has_is_named(task):
    made = task("resnet18", {"train": ["cat", "dog"], "test": ["cat", "ape"]})
    with pytest.raises(DataError, match=r"^data\.test: 1 images .*test\.parquet row 1 with 'ape'"):
        made.source("test")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.preset=lmu-micro", "'lmu-micro' is no image model; .* mnist-net, resnet-18"),
        (
            "model.preset=resnet-19",
            r"^model\.preset: 'resnet-19' is no image model; nearest is resnet-18",
        ),
        ("model.dropout=0.1", r"^model\.dropout: does not apply to mnist-net"),
        ("model.norm=batch", r"^model\.norm: does not apply"),
    ],
)
def test_what_does_not_apply_to_images_is_refused(override, words):
    with pytest.raises(RecipeError, match=words):
        build_task(load("digits", [override]))


def test_a_model_of_images_is_not_cut():
    made = build_task(load("digits", []))
    assert made.weights() is None
    with pytest.raises(RecipeError, match=r"^distributed\.strategy: .* cannot be split"):
        made.build_part(0, 1)


SMALL = ["logging.to=[]", "checkpoint.every_steps=null", "training.precision=fp32"]


def run(mesh: Any, folder: str, recipe: str, overrides: list[str]) -> tuple[Any, Any]:
    """The lines of metrics.jsonl and the score on the test images."""
    where = run_directory.Run(Path(folder))
    if mesh.first:
        (where.path / "ranks").mkdir(parents=True, exist_ok=True)
    mesh.barrier()
    job = prepare(load(recipe, [*SMALL, *overrides]), mesh, where)
    train(job)
    job.observer.close()
    score = evaluate(job.task, job.engine, "test", mesh, 32, torch.no_grad)
    mesh.barrier()
    return read_lines(where.path / "metrics.jsonl"), score


@pytest.mark.guides
def test_the_shipped_recipe_reads_digits(ranks, tmp_path):
    _, score = ranks(1)(run, str(tmp_path), "digits", [])[0]
    assert score.scores["images"] == 347
    assert score.scores["accuracy"] > 0.95
    assert score.worst[0].edits == 1


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("digits", []),
        pytest.param(
            "resnet18",
            ["data.train=embedded:digits", "data.image_size=8"],
            marks=pytest.mark.full,
        ),
    ],
)
def test_two_ranks_train_as_one(ranks, tmp_path, recipe, overrides):
    """Sums in another order differ by 1e-6; AdamW's first steps, which look at little more than a
    gradient's sign, make more of it, the less the smaller the learning rate."""
    overrides = [
        *overrides,
        "training.epochs=null",
        "training.steps=3",
        "training.global_batch_size=12",
        "training.warmup_steps=0",
        "training.lr=1e-5",
        "evaluation.every_steps=null",
    ]
    (one, score), *_ = ranks(1)(run, str(tmp_path / "one"), recipe, overrides)
    (two, scores), *_ = ranks(2)(run, str(tmp_path / "two"), recipe, overrides)
    for name in ("loss", "grad_norm"):
        expected = [line[name] for line in one]
        assert [line[name] for line in two] == pytest.approx(expected, rel=1e-5)
    assert scores.scores["images"] == score.scores["images"] == 347
    assert scores.scores["loss"] == pytest.approx(score.scores["loss"], rel=1e-4)
