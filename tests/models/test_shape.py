"""Sizes by key: `model.shape` on top of a preset."""

from __future__ import annotations

import dataclasses
import re

import pytest

from muster.errors import RecipeError
from muster.models.configs import DecoderConfig, WhisperConfig
from muster.models.presets import OF_TASK, PRESETS, check_preset, configure
from muster.models.shape import KEYS
from muster.recipe.load import load
from muster.recipe.model import Model
from muster.recipe.shape import Shape

SHAPED = {name: config for name, config in PRESETS.items() if type(config) in KEYS}


def sizes(text: str) -> dict[str, int]:
    return {key: int(value) for key, value in (word.split("=") for word in text.split())}


def test_six_layers_of_384_are_what_the_presets_rules_make_of_them():
    small = configure("gpt2", sizes("layers=6 width=384"))
    assert small == DecoderConfig(50257, 6, 384, heads=6, hidden=1536, kv_heads=6, positions=1024)


@pytest.mark.parametrize("preset", SHAPED)
def test_a_presets_own_sizes_give_the_preset(preset):
    config = SHAPED[preset]
    own = {key: getattr(config, fields[0]) for key, fields in KEYS[type(config)].items()}
    if "ff_mult" in vars(config):
        own["hidden"] = config.width * config.ff_mult
    assert configure(preset, own) == config
    assert configure(preset, {}) == configure(preset) == config


@pytest.mark.parametrize(
    ("preset", "shape", "expected"),
    [
        ("llama-1b", "width=1024", {"heads": 16, "kv_heads": 2, "hidden": 2816, "head_size": 64}),
        ("llama-1b", "width=768", {"heads": 12, "kv_heads": 1, "hidden": 2112, "layers": 22}),
        ("llama-7b", "width=512", {"heads": 4, "kv_heads": 4, "hidden": 1376}),
        ("llama-3-8b", "heads=16", {"width": 4096, "kv_heads": 4, "head_size": 256}),
        ("llama-micro", "width=96 kv_heads=3 hidden=100", {"kv_heads": 3, "hidden": 100}),
        ("gpt2-xl", "width=100 heads=4 positions=77", {"hidden": 400, "positions": 77}),
        ("whisper-tiny", "layers=2 width=64", {"encoder_layers": 2, "decoder_layers": 2}),
        ("whisper-tiny", "width=64", {"encoder_heads": 1, "decoder_hidden": 256}),
        ("whisper-base", "layers=3 encoder_layers=5", {"encoder_layers": 5, "decoder_layers": 3}),
        ("whisper-base", "positions=100", {"target_positions": 100, "source_positions": 1500}),
        ("lmu-7m", "width=96 layers=2", {"blocks": 2, "ff_mult": 4, "channels": 24}),
        ("lmu-7m", "hidden=512 kernel=31", {"ff_mult": 2, "kernel": 31}),
        ("lmu-7m-causal", "kernel=8 theta=30", {"kernel": 8, "theta_frames": 30}),
        ("lmu-guide", "width=128 order=32 theta=50", {"heads": 2, "order": 32, "theta": 50}),
    ],
)
def test_what_is_not_given_follows(preset, shape, expected):
    found = dataclasses.asdict(configure(preset, sizes(shape)))
    assert {key: found[key] for key in expected} == expected


REFUSALS = [
    ("gpt2", "width=400", "model.shape.heads: the width 400 is not a multiple of 64, "),
    ("gpt2", "heads=7", "model.shape.heads: 7 does not divide the width 768; use 6, 8, 12 or 16"),
    ("gpt2", "width=383 heads=5", "model.shape.heads: 5 does not divide the width 383; "),
    ("gpt2", "kv_heads=4", "model.shape.kv_heads: 4, but gpt2 has a key and a value for each"),
    ("llama-1b", "width=768 heads=256", "3 numbers each, and rotary positions need an even"),
    ("llama-1b", "width=383", "model.shape.width: 383 is odd, .* use 384"),
    ("llama-1b", "width=383 heads=383", "model.shape.width: 383 is odd, .* use 766"),
    ("llama-1b", "heads=16 kv_heads=5", "5 does not divide the 16 heads; use 1, 2, 4, 8 or 16"),
    ("whisper-base", "width=65", "model.shape.width: 65; .*: use 64"),
    ("whisper-base", "heads=9", "model.shape.heads: 9 does not divide the width 512; "),
    ("lmu-7m", "hidden=300", "300 is not a multiple of the width 256; use 256 or 512"),
    ("lmu-7m", "hidden=30", "30 is not a multiple of the width 256; use 256 or 512"),
    ("lmu-7m", "kernel=8", "8 is even, and the convolutions of lmu-7m are centred; use 7 or 9"),
    ("lmu-guide", "width=100", "model.shape.heads: the width 100 is not a multiple of 64, "),
    ("lmu-7m", "heads=4", "lmu-7m has no such size; it has layers, width, hidden, channels, order"),
    ("gpt2", "channels=4", "gpt2 has no such size; it has layers, width, heads, kv_heads, hidden"),
    ("resnet-18", "width=4", "model.shape: does not apply to resnet-18; leave it out"),
]


@pytest.mark.parametrize(("preset", "shape", "words"), REFUSALS)
def test_sizes_that_cannot_be_are_refused_by_key_with_numbers_that_can(preset, shape, words):
    task = next(task for task, (_, kinds) in OF_TASK.items() if isinstance(PRESETS[preset], kinds))
    with pytest.raises(RecipeError, match=words) as caught:
        check_preset(task, preset, sizes(shape))
    text = str(caught.value)
    key = re.match(r"model\.shape\.(\w+):", text)
    for number in re.findall(r"\d+", re.sub(r", or model.*", "", text.partition(" use ")[2])):
        configure(preset, sizes(shape) | {key[1]: int(number)})
    for other, number in re.findall(r"or model\.shape\.(\w+)=(\d+)", text):
        configure(preset, sizes(shape) | {other: int(number)})


def test_every_key_belongs_to_a_family():
    assert set(Shape.model_fields) == {key for keys in KEYS.values() for key in keys}
    for config in (DecoderConfig, WhisperConfig):
        assert {"layers", "width", "heads", "hidden", "positions"} <= set(KEYS[config])


def test_a_pretrained_model_keeps_its_sizes():
    with pytest.raises(RecipeError, match=r"^model\.shape: model\.pretrained=x has its own sizes"):
        load("gpt2", ["model.pretrained=x", "model.shape.layers=3"])
    assert load("gpt2", ["model.pretrained=x", "model.shape={}"]).model.shape is None


def test_the_model_is_named_with_its_sizes():
    assert load("gpt2", ["model.shape={layers: 6, width: 384}"]).model.title == (
        "gpt2 (layers=6, width=384)"
    )
    assert (Model().title, Model(pretrained="x").title) == ("lmu-micro", "x")


def test_a_size_beside_the_preset_is_pointed_to_the_shape():
    with pytest.raises(RecipeError, match=r"^model\.layers: .*model\.shape\.layers"):
        load("gpt2", ["model.layers=6"])


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [
        ("gpt-micro", "{layers: 2, width: 64, hidden: 67}"),
        ("llama-micro", "{layers: 2, width: 64, heads: 4, kv_heads: 1}"),
        ("whisper-micro", "{encoder_layers: 1, width: 64}"),
        ("speech", "{layers: 1, width: 32, channels: 4, order: 4, kernel: 3}"),
        ("speech-guide", "{layers: 1, width: 64, order: 8}"),
    ],
)
def test_a_task_builds_the_model_of_that_shape(recipe, shape):
    from muster.tasks import build_task

    loaded = load(recipe, [f"model.shape={shape}", "data.tokenizer.kind=auto"])
    model = build_task(loaded).build_model()
    expected = configure(loaded.model.preset, loaded.model.sizes)
    for field in ("layers", "blocks", "width", "hidden", "ff_mult", "encoder_layers", "order"):
        if hasattr(expected, field):
            assert getattr(model.config, field) == getattr(expected, field)
    assert model.config != configure(loaded.model.preset)
