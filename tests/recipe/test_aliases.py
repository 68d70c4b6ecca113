"""Older key names: they mean today's keys, in files and in overrides, and never win silently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from muster.errors import RecipeError
from muster.recipe.aliases import TABLE, alias_table, as_named_today
from muster.recipe.describe import keys
from muster.recipe.load import load, read
from muster.recipe.schema import Recipe

SAMPLES = {
    "distributed.strategy": "ddp",
    "distributed.backend": "gloo",
    "distributed.ddp.find_unused_parameters": True,
    "distributed.ddp.bucket_mb": 10.0,
    "distributed.fsdp.wrap": ["DecoderBlock"],
    "distributed.fsdp.cpu_offload": True,
    "training.lr": 0.5,
}


def refusal(name: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(name, overrides)
    return str(caught.value)


def file(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def value_of(recipe: object, key: str) -> object:
    for part in key.split("."):
        recipe = getattr(recipe, part)
    return recipe


def test_the_table_leads_from_names_that_are_gone_to_keys_that_exist() -> None:
    for row in TABLE:
        assert row.old not in keys(), row.old
        assert row.new in keys() or (row.note and not row.new and not row.when), row.old


@pytest.mark.parametrize("row", [row for row in TABLE if row.when is None], ids=lambda row: row.old)
@pytest.mark.parametrize("where", ["file", "override"])
def test_an_older_name_sets_its_key(tmp_path: Path, row: object, where: str) -> None:
    old, new = row.old, row.new  # type: ignore[attr-defined]
    value = SAMPLES.get(new, 7)
    document = {"training": {} if new in ("training.steps", "training.epochs") else {"steps": 5}}
    overrides = []
    if where == "override":
        overrides = [f"{old}={json.dumps(value)}"]
    else:
        *sections, leaf = old.split(".")
        inner = document
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[leaf] = value
    text = yaml.safe_dump(document)
    loaded = read(file(tmp_path, text), overrides)
    assert value_of(loaded.recipe, new) == value
    assert loaded.renamed == {old: new}


FSDP_SECTION = """
training:
  steps: 5
  distributed_strategy: fsdp
  fsdp_config:
    fsdp_transformer_layer_cls_to_wrap: WhisperEncoderLayer
    fsdp_backward_prefetch: {prefetch}
    fsdp_state_dict_type: full_state_dict
    fsdp_offload_params: false
"""


def test_an_fsdp_section_of_transformers_is_understood(tmp_path: Path) -> None:
    options = load(file(tmp_path, FSDP_SECTION.format(prefetch="no_prefetch"))).distributed.fsdp
    assert options.wrap == ["WhisperEncoderLayer"]
    assert not options.backward_prefetch
    assert not options.cpu_offload
    assert load(file(tmp_path, FSDP_SECTION.format(prefetch="backward_pre"))).distributed.fsdp == (
        options.model_copy(update={"backward_prefetch": True})
    )
    message = refusal(file(tmp_path, FSDP_SECTION.format(prefetch="sometimes")))
    assert "fsdp_backward_prefetch: got sometimes, expected backward_pre or no_prefetch" in message


STATE_DICT = "training.fsdp_config.fsdp_state_dict_type"


@pytest.mark.parametrize("kind", ["full_state_dict", "SHARDED_STATE_DICT"])
def test_the_kind_of_a_state_dict_changes_nothing_and_says_why(tmp_path: Path, kind: str) -> None:
    plain, note = load("speech"), "checkpoints are always in shards"
    loaded = read("speech", [f"{STATE_DICT}={kind}"])
    assert loaded.recipe == plain
    assert loaded.renamed[STATE_DICT].startswith(f"nothing: {note}")
    assert "`muster export` writes whole weights" in loaded.renamed[STATE_DICT]
    assert (
        f"| `{STATE_DICT}` | `full_state_dict` or `sharded_state_dict`: says nothing; {note}"
        in (alias_table())
    )


def test_a_kind_of_state_dict_that_muster_cannot_stand_for_is_refused() -> None:
    assert refusal("speech", f"{STATE_DICT}=LOCAL_STATE_DICT") == (
        f"{STATE_DICT}: got LOCAL_STATE_DICT, expected full_state_dict or sharded_state_dict"
    )


def test_the_kind_of_a_state_dict_is_tied_to_no_other_key(tmp_path: Path) -> None:
    path = file(tmp_path, FSDP_SECTION.format(prefetch="backward_pre"))
    loaded = read(path, ["checkpoint.asynchronous=false"])
    assert not loaded.recipe.checkpoint.asynchronous
    assert STATE_DICT in loaded.renamed
    assert STATE_DICT not in read(path, [f"~{STATE_DICT}"]).renamed
    with pytest.raises(RecipeError, match=r"checkpoint\.asynchronous: nothing to delete"):
        read(path, ["~checkpoint.asynchronous"])


def test_words_of_a_switch_are_read_in_either_case(tmp_path: Path) -> None:
    path = file(tmp_path, FSDP_SECTION.format(prefetch="NO_PREFETCH"))
    assert not load(path).distributed.fsdp.backward_prefetch


def test_a_file_that_gives_both_names_different_values_is_refused(tmp_path: Path) -> None:
    text = "training: {steps: 5, batch_size: 32, global_batch_size: 16}\n"
    message = refusal(file(tmp_path, text))
    assert "training.batch_size asks for 32 and training.global_batch_size for 16" in message


def test_two_older_names_of_one_key_that_disagree_are_both_named(tmp_path: Path) -> None:
    text = "training: {num_epochs: 3, num_train_epochs: 4}\n"
    message = refusal(file(tmp_path, text))
    assert "training.num_epochs asks for 3 and training.num_train_epochs for 4" in message


def test_both_names_may_agree(tmp_path: Path) -> None:
    text = "training: {steps: 5, batch_size: 32, global_batch_size: 32}\n"
    assert load(file(tmp_path, text)).training.global_batch_size == 32


def test_overrides_that_give_both_names_different_values_are_refused() -> None:
    for pair in (
        ["training.batch_size=3", "training.global_batch_size=4"],
        ["training.global_batch_size=4", "training.batch_size=3"],
    ):
        message = refusal("speech", *pair)
        assert "training.batch_size asks for 3 and training.global_batch_size for 4" in message


@pytest.mark.parametrize("in_file", ["batch_size", "global_batch_size"])
@pytest.mark.parametrize("in_override", ["batch_size", "global_batch_size"])
def test_an_override_wins_over_the_file_under_either_name(
    tmp_path: Path, in_file: str, in_override: str
) -> None:
    text = f"training: {{steps: 5, {in_file}: 32}}\nseed: ${{training.{in_file}}}\n"
    recipe = load(file(tmp_path, text), [f"training.{in_override}=64"])
    assert recipe.training.global_batch_size == 64
    assert recipe.seed == 64


def test_an_override_wins_between_two_older_names_of_one_key(tmp_path: Path) -> None:
    path = file(tmp_path, "training: {num_epochs: 3}\n")
    assert load(path, ["training.num_train_epochs=4"]).training.epochs == 4


def test_an_override_fills_a_gap_left_under_the_older_name(tmp_path: Path) -> None:
    path = file(tmp_path, "training: {steps: 5, batch_size: '???'}\n")
    assert load(path, ["training.global_batch_size=64"]).training.global_batch_size == 64


def test_deleting_a_key_takes_its_older_name_too(tmp_path: Path) -> None:
    path = file(tmp_path, "training: {steps: 5, learning_rate: 0.5}\n")
    assert load(path, ["~training.lr"]).training.lr == 1e-3


@pytest.mark.parametrize(
    ("text", "overrides", "devices"),
    [
        ("enabled: true", [], "auto"),
        ("enabled: false", [], 1),
        ("enabled: true, devices: 4", [], 4),
        ("enabled: false, devices: 1", [], 1),
        ("enabled: false", ["distributed.devices=4"], 4),
        ("enabled: false", ["distributed.enabled=true"], "auto"),
        ("devices: 4", ["distributed.enabled=true"], 4),
        ("devices: 4", ["distributed.enabled=false"], 1),
    ],
)
def test_distributed_enabled_only_ever_means_one_device_or_nothing(
    tmp_path: Path, text: str, overrides: list[str], devices: object
) -> None:
    path = file(tmp_path, f"training: {{steps: 5}}\ndistributed: {{{text}}}\n")
    assert load(path, overrides).distributed.devices == devices


def test_distributed_disabled_with_several_devices_is_refused(tmp_path: Path) -> None:
    path = file(tmp_path, "training: {steps: 5}\ndistributed: {enabled: false, devices: 4}\n")
    assert "distributed.enabled asks for 1 and distributed.devices for 4" in refusal(path)


def test_distributed_enabled_takes_only_true_or_false() -> None:
    assert refusal("speech", "distributed.enabled=[]") == (
        "distributed.enabled: got [], expected true or false"
    )


def test_an_error_shows_the_name_that_was_typed() -> None:
    assert refusal("speech", "training.max_steps=-1").startswith(
        "training.max_steps (now training.steps): got -1, expected a whole number greater than 0"
    )


def test_a_checkpoint_from_before_a_key_had_its_name_loads() -> None:
    """Its recipe.json is validated as it is: nothing composes it."""
    document = load("gpt-micro").as_dict()
    del document["logging"]["to"]
    document["logging"]["tensorboard"] = False
    before = json.dumps(document)
    assert Recipe.model_validate(as_named_today(document)).logging.to == []
    assert json.dumps(document) == before
