"""LoRA under DDP and FSDP: the same course as in one process, and the pretrained weights rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from muster.checks.parity import distance, short_recipe, training_curve
from muster.recipe.load import load

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=257,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    ).save_pretrained(folder)
    return str(folder)


def fine_tune(mesh, folder: str, pretrained: str, corpus: str, strategy: str):
    overrides = [
        f"model.pretrained={pretrained}",
        "model.lora={rank: 4, targets: [q, v, up]}",
        "data.tokenizer.kind=bytes",
        f"data.train={corpus}",
        "data.sequence_length=24",
        "training.global_batch_size=10",
        f"distributed.strategy={strategy}",
    ]
    made = training_curve(load("llama-micro", short_recipe(overrides)), mesh, Path(folder))
    return made if mesh.first else None


@pytest.fixture(scope="module")
def alone(ranks, pretrained, small_corpus, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("alone"))
    return ranks(1)(fine_tune, folder, pretrained, small_corpus, "ddp")[0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_adapters_train_alike(ranks, pretrained, small_corpus, alone, tmp_path, strategy):
    together = ranks(2)(fine_tune, str(tmp_path), pretrained, small_corpus, strategy)[0]
    found = distance(alone, together)
    assert found.small, found


def test_only_the_adapters_move(pretrained, alone):
    from safetensors.torch import load_file

    base = load_file(Path(pretrained, "model.safetensors"))
    weights = alone.weights
    assert torch.equal(
        weights["blocks.0.attention.q.base_layer.weight"],
        base["model.layers.0.self_attn.q_proj.weight"],
    )
    assert torch.equal(weights["norm.weight"], base["model.norm.weight"])
    moved = [n for n, w in weights.items() if "lora_B" in n and w.abs().max() > 0]
    assert len(moved) == 6


def test_zero_refuses_adapters_by_name(ranks, pretrained, small_corpus, tmp_path):
    from pool import RankError

    with pytest.raises(RankError) as failure:
        ranks(2)(fine_tune, str(tmp_path), pretrained, small_corpus, "zero2")
    assert failure.value.kind == "RecipeError"
    assert "model.lora" in failure.value.message
