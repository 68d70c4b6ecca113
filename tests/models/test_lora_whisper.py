from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import WhisperForConditionalGeneration

from muster.errors import RecipeError
from muster.models import lora
from muster.models.whisper.folder import WhisperWeights, export, read_config
from muster.models.whisper.model import Whisper
from whisper_reference import END, features, fill, load, make, their_logits, tokens

RANK, ALPHA = 3, 5.0
ALL = ["q", "k", "v", "o", "up", "down"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def adapted(folder: Path, targets: list[str], freeze_encoder: bool = False) -> Whisper:
    config = read_config(folder)
    with torch.device("meta"):
        model = Whisper(config, freeze_encoder)
        lora.attach(model, rank=RANK, alpha=ALPHA, dropout=0.0, targets=targets)
    return fill(model, lora.AdapterWeights(WhisperWeights(folder, config), 1))


def train(model: Whisper) -> Whisper:
    """As if: the adapters now do something."""
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.5)
    return model


@pytest.mark.parametrize(
    ("targets", "freeze_encoder", "adapters"),
    [
        (["q", "v"], False, 2 * (2 + 2 * 3)),
        (["q", "v"], True, 2 * 2 * 3),
        (["up", "o"], False, 2 * 2 + 3 * 3),
        (ALL, False, 6 * 2 + 10 * 3),
    ],
)
def test_targets_mean_the_layers_of_encoder_and_decoder(
    folder: Path, targets: list[str], freeze_encoder: bool, adapters: int
):
    model = adapted(folder, targets, freeze_encoder)
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in learning)
    assert len(learning) == 2 * adapters
    assert any("encoder.layers" in name for name in learning) == (not freeze_encoder)
    train(model)(features(), tokens()).square().sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == learning


@torch.no_grad()
def test_at_the_start_the_logits_are_the_base_models(folder: Path):
    found = adapted(folder, ALL)(features(), tokens())
    torch.testing.assert_close(found, load(folder)(features(), tokens()), rtol=0, atol=0)


@pytest.mark.parametrize("targets", [["q", "gate"], ["gate_proj"], []])
def test_unknown_targets_are_refused_with_the_names_that_exist(folder: Path, targets: list[str]):
    with pytest.raises(RecipeError, match=r"model\.lora\.targets.*q, k, v, o, up, down"):
        adapted(folder, targets)


@pytest.mark.parametrize(
    ("targets", "freeze_encoder"), [(["q", "v"], False), (["k", "down"], True), (ALL, False)]
)
@torch.no_grad()
def test_exports_give_transformers_the_adapted_logits(
    folder: Path, tmp_path: Path, targets: list[str], freeze_encoder: bool
):
    model = train(adapted(folder, targets, freeze_encoder))
    logits, state = model(features(), tokens()), model.state_dict()
    assert (logits - load(folder)(features(), tokens())).abs().max() > 0.1

    merged = lora.merged(state, ALPHA, RANK)
    export(tmp_path / "merged", model.config, merged, {}, {"pad_token_id": END})
    theirs = WhisperForConditionalGeneration.from_pretrained(tmp_path / "merged").eval()
    found = their_logits(theirs, features(), tokens())
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-5)

    lora.export_adapter(
        tmp_path / "adapter", model.config, state, rank=RANK, alpha=ALPHA, base=str(folder)
    )
    base = WhisperForConditionalGeneration.from_pretrained(folder)
    peft = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    placed = {name for name, _ in peft.named_parameters() if "lora_" in name}
    assert placed == {name.replace(".weight", ".default.weight") for name in saved}
    for each in (peft, peft.merge_and_unload()):
        found = their_logits(each, features(), tokens())
        torch.testing.assert_close(found, logits, rtol=0, atol=1e-5)


def test_an_adapters_config_names_the_base_and_no_task(folder: Path, tmp_path: Path):
    """peft's class for sequence-to-sequence models calls them with input_ids, which Whisper lacks."""
    model = train(adapted(folder, ["q"]))
    lora.export_adapter(
        tmp_path / "out", model.config, model.state_dict(), rank=RANK, alpha=ALPHA, base="x/y"
    )
    document = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert document["base_model_name_or_path"] == "x/y"
    assert document["task_type"] is None
