from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, WhisperForConditionalGeneration, WhisperModel

from muster.errors import CheckpointError, RecipeError
from muster.models.whisper.folder import (
    WhisperWeights,
    export,
    read_config,
    read_generation,
)
from muster.models.whisper.model import Whisper
from real import WHISPER, needs_whisper
from whisper_reference import END, START, features, fill, load, make, their_logits, tokens

IDS = {"pad_token_id": END, "eos_token_id": END, "bos_token_id": END}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@torch.no_grad()
def test_a_sharded_half_precision_folder_gives_float32(tmp_path: Path):
    theirs = make().half()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    model = load(tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    expected = their_logits(theirs.float(), features(), tokens())
    torch.testing.assert_close(model(features(), tokens()), expected, rtol=0, atol=1e-5)


def test_a_region_is_that_part_of_the_whole(folder: Path):
    weights = WhisperWeights(folder, read_config(folder))
    name = "model.encoder.conv1.weight"
    whole = load_file(folder / "model.safetensors")[name]
    region = (slice(3, 9), slice(0, 10), slice(0, 3))
    found = weights.read(name, tuple(whole.shape), region, torch.device("cpu"))
    assert torch.equal(found, whole[3:9])


@torch.no_grad()
def test_the_bare_model_without_its_head_is_read_too(tmp_path: Path):
    theirs = make()
    bare = WhisperModel(theirs.config)
    bare.load_state_dict(theirs.model.state_dict())
    bare.save_pretrained(tmp_path)
    assert "encoder.conv1.weight" in load_file(tmp_path / "model.safetensors")
    expected = their_logits(theirs, features(), tokens())
    torch.testing.assert_close(load(tmp_path)(features(), tokens()), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
@torch.no_grad()
def test_an_export_gives_transformers_our_logits(folder: Path, tmp_path: Path, shard_bytes: int):
    model = load(folder)
    files = {"generation_config.json": b'{"is_multilingual": false, "max_length": 17}'}
    keys = IDS | {"decoder_start_token_id": START}
    out = tmp_path / "out"
    export(out, model.config, model.state_dict(), files, keys, shard_bytes=shard_bytes)
    assert (len(list(out.glob("*.safetensors"))) > 1) == (shard_bytes < 10**6)
    theirs, info = WhisperForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.config.decoder_start_token_id == START
    assert theirs.config.pad_token_id == END
    assert GenerationConfig.from_pretrained(out).max_length == 17
    logits = their_logits(theirs.eval(), features(), tokens())
    torch.testing.assert_close(logits, model(features(), tokens()), rtol=0, atol=1e-5)
    assert read_config(out) == model.config


@torch.no_grad()
def test_an_export_without_token_ids_loads_whatever_its_vocabulary(folder: Path, tmp_path: Path):
    model = load(folder)
    export(tmp_path / "out", model.config, model.state_dict(), {}, {})
    theirs = WhisperForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
    logits = their_logits(theirs, features(), tokens())
    torch.testing.assert_close(logits, model(features(), tokens()), rtol=0, atol=1e-5)
    assert (
        theirs.config.begin_suppress_tokens is None
    )  # transformers would bar two words of tiny.en


def test_another_models_weights_are_not_exported(folder: Path, tmp_path: Path):
    state = load(folder).state_dict()
    state.pop("model.encoder.conv1.bias")
    with pytest.raises(CheckpointError, match=r"model\.encoder\.conv1\.bias"):
        export(tmp_path / "out", read_config(folder), state, {}, {})
    assert not (tmp_path / "out").exists()


@needs_whisper
@torch.no_grad()
def test_tiny_en_gives_the_logits_it_gives_in_transformers():
    theirs = WhisperForConditionalGeneration.from_pretrained(WHISPER, dtype=torch.float32).eval()
    heard = torch.randn(1, 3000, 80)
    said = torch.tensor([[50257, 50362, 1639, 389, 257, 3285]])
    expected = their_logits(theirs, heard, said)
    torch.testing.assert_close(load(WHISPER)(heard, said), expected, rtol=0, atol=1e-4)


@needs_whisper
def test_tiny_en_says_what_not_to_begin_with():
    found = read_generation(WHISPER)
    assert found.suppress == ()
    assert found.suppress_first == (220, 50256)
    assert found.keys["no_timestamps_token_id"] == 50362


def test_what_not_to_say_comes_from_the_generation_config_or_the_older_place(folder: Path):
    generation = folder / "generation_config.json"
    edit(folder / "config.json", suppress_tokens=[1, 2], begin_suppress_tokens=[3])
    edit(generation, suppress_tokens=[5], begin_suppress_tokens=None)
    assert read_generation(folder).suppress == (5,)
    assert read_generation(folder).suppress_first == ()
    generation.unlink()
    assert read_generation(folder).suppress == (1, 2)
    assert read_generation(folder).suppress_first == (3,)
    generation.write_text("{")
    with pytest.raises(RecipeError, match=r"generation_config\.json cannot be read"):
        read_generation(folder)
    generation.write_text('{"suppress_tokens": [-1]}')
    with pytest.raises(
        RecipeError, match=r"suppress_tokens = \[-1\]; muster reads a list of token"
    ):
        read_generation(folder)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'; for this task muster reads whisper"),
        ({"activation_function": "relu"}, 'activation_function = "relu"'),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = false"),
        ({"d_model": 0}, "d_model = 0; muster reads a positive whole number"),
        ({"decoder_attention_heads": 5}, "width 32 is not a multiple of decoder_heads 5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_unusual_configs_are_refused_by_the_key(folder: Path, keys: dict[str, Any], words: str):
    edit(folder / "config.json", **keys)
    with pytest.raises(RecipeError, match=r"model\.pretrained.*config\.json") as caught:
        read_config(folder)
    assert words in str(caught.value)


def test_a_folder_without_a_config_is_refused(tmp_path: Path):
    with pytest.raises(RecipeError, match=r"has no config\.json"):
        read_config(tmp_path)


def test_damaged_folders_are_named_with_what_they_lack(folder: Path, tmp_path: Path):
    config = read_config(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)

    def refused(words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            WhisperWeights(folder, config)

    lacking = {n: t for n, t in tensors.items() if n != "model.decoder.embed_tokens.weight"}
    save_file(lacking, path)
    refused(r"lacks model\.decoder\.embed_tokens\.weight")
    save_file(tensors | {"model.encoder.conv1.weight": torch.zeros(32, 9, 3)}, path)
    refused(r"conv1\.weight is \[32, 9, 3\], expected \[32, 10, 3\]")
    path.write_bytes(path.read_bytes()[:-100])
    refused("damaged or cut short")
    path.write_bytes(struct.pack("<Q", 2**40))
    refused("damaged or cut short")
    path.unlink()
    refused("muster reads safetensors only")


def test_a_missing_shard_is_named(tmp_path: Path):
    make().save_pretrained(tmp_path, max_shard_size="20KB")
    gone = sorted(tmp_path.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=f"lacks {gone.name}"):
        WhisperWeights(tmp_path, read_config(tmp_path))


def test_meta_models_are_filled_from_a_folder(folder: Path):
    config = read_config(folder)
    with torch.device("meta"):
        model = Whisper(config)
    fill(model, WhisperWeights(folder, config))
    assert {p.device.type for p in model.parameters()} == {"cpu"}
