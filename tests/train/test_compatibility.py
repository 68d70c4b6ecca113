"""What a checkpoint must share with the run that continues it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from muster import run_directory
from muster.api.train import resolve
from muster.entrypoints.open_run import open_run
from muster.errors import CheckpointError
from muster.recipe.describe import keys
from muster.recipe.load import from_resolved, load
from muster.run_directory import Run
from muster.training.compatibility import refuse_other_data, refuse_other_recipe
from muster.training.manifest import FORMAT, Saved, file_entry

DATA = {"samples": 10, "lengths": "abc", "shuffle": "full"}


def saved(folder, recipe: dict[str, Any], data: dict[str, Any] | None = None) -> Any:
    (folder / "recipe.json").write_text(json.dumps(recipe))
    (folder / "assets.json").write_text(json.dumps({"data": data or DATA}))
    return Saved(folder, {})


def test_a_checkpoint_from_before_a_key_existed_goes_on(tmp_path):
    recipe = load("speech").as_dict()
    older = json.loads(json.dumps(recipe))
    del older["model"]["freeze_encoder"], older["data"]["window"], older["data"]["shuffle"]
    del older["data"]["sequence_packing"]
    older["data"]["lowercase"] = True  # what `auto` means for speech-ctc
    refuse_other_recipe(saved(tmp_path, older), recipe)
    older["data"]["lowercase"] = False
    with pytest.raises(CheckpointError, match=r"data\.lowercase=False"):
        refuse_other_recipe(saved(tmp_path, older), recipe)


def test_text_that_was_packed_before_its_cuts_moved_goes_on_with_fixed_ones(tmp_path):
    older = load("gpt-micro").as_dict()
    del older["data"]["sequence_packing"]
    before = saved(tmp_path, older)
    refuse_other_recipe(before, load("gpt-micro", ["data.sequence_packing=fixed"]).as_dict())
    with pytest.raises(
        CheckpointError, match=r"data\.sequence_packing='fixed', .* has .*'shuffled'"
    ):
        refuse_other_recipe(before, load("gpt-micro").as_dict())

    (tmp_path / "recipe.yaml").write_text(json.dumps(older))
    assert from_resolved(tmp_path / "recipe.yaml").data.sequence_packing == "fixed"
    (tmp_path / "run.json").write_text('{"state": "stopped"}')
    run, recipe = resolve(str(tmp_path), ["training.steps=300"])
    assert run is not None
    assert recipe.training.steps == 300
    refuse_other_recipe(before, recipe.as_dict())
    _, changed = resolve(str(tmp_path), ["data.sequence_packing=shifted"])
    assert changed.data.sequence_packing == "shifted"
    older["data"]["sequence_packing"] = "shuffled"
    (tmp_path / "recipe.yaml").write_text(json.dumps(older))
    assert from_resolved(tmp_path / "recipe.yaml").data.sequence_packing == "shuffled"


@pytest.fixture
def old_run(tmp_path) -> Run:
    """Stopped after step 2, before data.sequence_packing existed."""
    older = load("gpt-micro").as_dict()
    del older["data"]["sequence_packing"]
    run = run_directory.create(tmp_path, "gpt", {}, exact="old")
    run.update(state="stopped")
    folder = run.path / "checkpoints" / "step-2"
    folder.mkdir(parents=True)
    (folder / "x.distcp").touch()
    (folder / "recipe.json").write_text(json.dumps(older))
    files = {"recipe.json": file_entry(folder / "recipe.json")}
    manifest = {"format": FORMAT, "trainer": {"step": 2}, "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return run


@pytest.mark.parametrize("how", ["--run", "checkpoint.resume"])
def test_a_recipe_that_goes_on_with_an_old_run_packs_as_it_did(old_run, tmp_path, how):
    options, name = [f"logging.dir={tmp_path}"], "old"
    if how == "checkpoint.resume":
        options, name = [*options, f"checkpoint.resume={old_run.path}"], "new"
    run, claim, recipe = open_run(load("gpt-micro", options), 1, 1, None, name)
    claim.close()
    assert run.name == name
    assert recipe.data.sequence_packing == "fixed"
    assert from_resolved(run.path / "recipe.yaml").data.sequence_packing == "fixed"
    run.update(state="stopped")
    _, claim, again = open_run(load("gpt-micro", options), 1, 1, None, name)
    claim.close()
    assert again.data.sequence_packing == "fixed"


def test_another_packing_for_an_old_run_is_refused(old_run, tmp_path):
    asked = ["data.sequence_packing=shuffled", f"logging.dir={tmp_path}"]
    with pytest.raises(CheckpointError, match=r"data\.sequence_packing='fixed', but .*'shuffled'"):
        open_run(load("gpt-micro", asked), 1, 1, None, "old")


@pytest.mark.parametrize(
    "change", ["data.window=20", "model.freeze_encoder=true", "data.buckets=3"]
)
def test_another_maths_is_refused_by_its_key(tmp_path, change):
    before = saved(tmp_path, load("whisper-micro").as_dict())
    key = change.partition("=")[0]
    with pytest.raises(CheckpointError, match=key.replace(".", r"\.")):
        refuse_other_recipe(before, load("whisper-micro", [change]).as_dict())


@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        ("layers=3", "layers=2", "model.shape.layers=3, but this recipe has model.shape.layers=2;"),
        (
            "layers=3",
            "width=64",
            "model.shape.layers=3, but this recipe has model.shape.layers=None;",
        ),
        (None, "layers=3", "model.shape=None, but this recipe has model.shape={'layers': 3};"),
    ],
)
def test_another_size_is_refused_by_its_key(tmp_path, was, now, words):
    before, after = (load("gpt-micro", [f"model.shape.{x}"] if x else []) for x in (was, now))
    with pytest.raises(CheckpointError, match=re.escape(words)):
        refuse_other_recipe(saved(tmp_path, before.as_dict()), after.as_dict())


def test_another_way_to_shuffle_is_named_and_not_blamed_on_the_data(tmp_path):
    before = saved(tmp_path, {}, DATA | {"shuffle": "groups", "lengths": "abc with groups"})
    with pytest.raises(CheckpointError, match=r"data\.cache_gib; set data\.shuffle=groups"):
        refuse_other_data(before, DATA)
    with pytest.raises(CheckpointError, match="trained on 11 samples"):
        refuse_other_data(saved(tmp_path, {}, DATA | {"samples": 11}), DATA)
    refuse_other_data(saved(tmp_path, {}, {"samples": 10, "lengths": "abc"}), DATA)


FIXED = """task task_options seed model.preset model.pretrained model.config model.trust_remote_code model.shape model.vocab_size model.lora model.freeze_encoder
model.freeze_feature_encoder model.norm data.train data.max_parquet_files data.audio_column data.text_column data.image_column
data.label_column data.format data.chat_template data.pack_rows data.sequence_length data.sequence_packing
data.isolate_documents data.image_size data.sample_rate
data.mels data.normalize data.spec_augment data.tokenizer data.lowercase data.unknown_characters
data.min_seconds data.max_seconds data.window data.buckets data.long_clips data.long_texts
data.language data.speech_task data.timestamps data.shuffle data.pool_batches
training.global_batch_size training.optimizer training.momentum training.ctc_weight"""


def test_these_keys_and_no_others_must_stay():
    assert {key.name for key in keys().values() if key.resume == "fixed"} == set(FIXED.split())
