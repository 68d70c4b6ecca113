"""Tiny random folders of families that transformers builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 256,
}
WINDOW: dict[str, Any] = {
    "head_dim": 8,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 8,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "granite": SIZES | {"logits_scaling": 2.0, "embedding_multiplier": 3.0},
    "gemma3_text": SIZES | WINDOW,
    "phi3": SIZES,
    "olmo2": SIZES,
    "gpt_neox": SIZES,
    "llama": SIZES | {"rope_parameters": YARN},  # what muster's own decoder does not have
    "mixtral": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
MORE: dict[str, dict[str, Any]] = {  # of the full table
    "gemma2": SIZES | WINDOW,
    "qwen3_moe": SIZES
    | {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
}


def config(family: str, **changes: Any) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[family].from_dict({**(FAMILIES | MORE)[family], **changes})


def make(family: str, **changes: Any) -> Any:
    """transformers' model, every parameter random, norms and biases too, so that a forgotten one shows."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(family, **changes)).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.15)
    return model


def save(family: str, folder: Path, **changes: Any) -> Any:
    model = make(family, **changes)
    model.save_pretrained(folder)
    return model
