from __future__ import annotations

import builtins
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from muster.errors import CheckpointError, MusterError, RecipeError
from muster.models import lora
from muster.models.configs import DecoderConfig
from muster.models.decoder import Decoder, Part, initial_std
from muster.models.huggingface.folder import export
from muster.models.weights import FreshWeights

CPU = torch.device("cpu")
GPT2 = DecoderConfig(61, 2, 32, 4, 56, positions=24)
LLAMA = DecoderConfig(
    61,
    2,
    32,
    4,
    56,
    kv_heads=2,
    positions=24,
    position="rotary",
    norm="rms",
    activation="swiglu",
    bias=False,
    qkv_bias=False,
    tied=False,
)
FAMILIES = {"gpt2": GPT2, "llama": LLAMA}
ALL = {"gpt2": ["q", "k", "v", "o", "up", "down"], "llama": ["q", "k", "v", "o", "gate", "up"]}
RANK, ALPHA = 3, 5.0
TOKENS = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(1))


def attach(model: Decoder, targets: list[str]) -> Decoder:
    lora.attach(model, rank=RANK, alpha=ALPHA, dropout=0.0, targets=targets)
    return model


def base(config: DecoderConfig) -> FreshWeights:
    return FreshWeights(7, lambda name: 4 * s if (s := initial_std(config, name)) else None)


def fill(model: Decoder, weights: Any) -> Decoder:
    state = {
        name: weights.read(name, tuple(p.shape), (slice(None),) * p.ndim, CPU)
        for name, p in model.named_parameters()
    }
    model.load_state_dict(state, assign=True)
    return model.eval()


def trained(family: str, targets: list[str]) -> Decoder:
    """A model whose adapters do something."""
    model = attach(Decoder(FAMILIES[family]), targets)
    fill(model, lora.AdapterWeights(base(FAMILIES[family]), 1))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.5)
    return model


@torch.no_grad()
def assert_same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_on_the_meta_device_only_adapters_learn_and_names_are_pefts(family: str):
    with torch.device("meta"):
        model = attach(Decoder(FAMILIES[family]), ["q", "v"])
    assert {p.device.type for p in model.parameters()} == {"meta"}
    learning = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    assert len(learning) == 2 * 2 * FAMILIES[family].layers
    assert learning["blocks.0.attention.q.lora_A.default.weight"] == (RANK, 32)
    assert learning["blocks.1.attention.q.lora_B.default.weight"] == (32, RANK)
    assert "blocks.0.attention.q.base_layer.weight" in model.state_dict()
    assert all(p.is_floating_point() for p in model.parameters())


def test_a_part_has_the_names_of_the_whole():
    with torch.device("meta"):
        whole = attach(Decoder(LLAMA), ["q", "up"]).state_dict().keys()
        first = attach(Decoder(LLAMA, Part(0, 1, 2)), ["q", "up"]).state_dict().keys()
        last = attach(Decoder(LLAMA, Part(1, 2, 2)), ["q", "up"]).state_dict().keys()
        nothing = attach(Decoder(LLAMA, Part(2, 2, 2)), ["q", "up"])
    assert whole == first | last
    assert not any(p.requires_grad for p in nothing.parameters())


def test_the_names_of_transformers_are_the_same_layers():
    with torch.device("meta"):
        ours = attach(Decoder(LLAMA), ["q", "o", "gate", "up"])
        theirs = attach(Decoder(LLAMA), ["q_proj", "o_proj", "gate_proj", "up", "up_proj"])
    assert list(theirs.state_dict()) == list(ours.state_dict())
    with pytest.raises(RecipeError, match=r"targets: gate_proj, c_attn; this model's"):
        attach(Decoder(GPT2), ["q_proj", "gate_proj", "c_attn"])


@pytest.mark.parametrize("targets", [["q", "gate"], ["head"], ["tokens"], []])
def test_unknown_targets_are_refused_with_the_names_that_exist(targets: list[str]):
    with pytest.raises(RecipeError, match=r"model\.lora\.targets.*q, k, v, o, up, down"):
        attach(Decoder(GPT2), targets)


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name == "peft":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MusterError, match=r"pip install 'muster-train\[peft\]'"):
        attach(Decoder(GPT2), ["q"])


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_at_the_start_the_logits_are_the_base_models(family: str):
    plain = fill(Decoder(FAMILIES[family]), base(FAMILIES[family]))
    model = attach(Decoder(FAMILIES[family]), ALL[family])
    fill(model, lora.AdapterWeights(base(FAMILIES[family]), 1))
    torch.testing.assert_close(model(TOKENS), plain(TOKENS), rtol=0, atol=0)


def test_fresh_adapters_follow_seed_and_name_and_spread_as_pefts():
    name, shape = "blocks.0.attention.q.lora_A.default.weight", (64, 400)
    whole_region = (slice(None), slice(None))

    def read(seed: int, name: str, region: tuple[slice, ...] = whole_region) -> Tensor:
        return lora.AdapterWeights(base(GPT2), seed).read(name, shape, region, CPU)

    whole = read(1, name)
    assert torch.equal(read(1, name, (slice(3, 9), slice(5, None))), whole[3:9, 5:])
    assert not torch.equal(read(2, name), whole)
    assert not torch.equal(read(1, name.replace("q", "v")), whole)
    reference = torch.nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5))
    assert whole.abs().max() <= 1 / math.sqrt(400)
    torch.testing.assert_close(whole.std(), reference.std(), rtol=0.02, atol=0)
    zero = read(1, name.replace("lora_A", "lora_B"), (slice(0, 4), slice(None)))
    assert zero.shape == (4, 400)
    assert not zero.any()


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("gpt2", ["q", "v"]),
        ("gpt2", ["v", "down"]),
        ("gpt2", ["o"]),
        ("gpt2", ALL["gpt2"]),
        ("llama", ["q", "v"]),
        ("llama", ALL["llama"]),
    ],
)
@torch.no_grad()
def test_exports_give_transformers_the_adapted_logits(
    family: str, targets: list[str], tmp_path: Path
):
    config = FAMILIES[family]
    model = trained(family, targets)
    plain = fill(Decoder(config), base(config))
    ours = model(TOKENS)
    assert (ours - plain(TOKENS)).abs().max() > 0.1
    state = model.state_dict()

    merged = lora.merged(state, ALPHA, RANK)
    assert merged.keys() == plain.state_dict().keys()
    export(tmp_path / "merged", config, merged)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert_same(loaded(TOKENS).logits, ours)

    export(tmp_path / "base", config, plain.state_dict())
    lora.export_adapter(
        tmp_path / "adapter", config, state, rank=RANK, alpha=ALPHA, base=str(tmp_path / "base")
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    placed = {name for name, _ in adapted.named_parameters() if "lora_" in name}
    assert placed == {name.replace(".weight", ".default.weight") for name in saved}
    assert_same(adapted(TOKENS).logits, ours)
    assert_same(adapted.merge_and_unload()(TOKENS).logits, ours)


def test_a_model_without_adapters_has_none_to_export(tmp_path: Path):
    with pytest.raises(CheckpointError, match="no adapters"):
        lora.export_adapter(
            tmp_path / "out", GPT2, Decoder(GPT2).state_dict(), rank=1, alpha=1, base="x"
        )
    assert not any(tmp_path.iterdir())
