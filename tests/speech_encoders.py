"""Small random speech encoders of transformers, as folders, to compare with and to fine-tune."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

# As facebook's: upper-case letters, | for the space, <pad> for the blank.
LETTERS = "|ETAONIHSRDLUMWCFGYPBVK'XJQZ"
TOKENS = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {c: i + 4 for i, c in enumerate(LETTERS)}
COMMON: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "initializer_range": 0.1,
}
RAW: dict[str, Any] = {
    "conv_dim": [12, 16],
    "conv_kernel": [20, 9],
    "conv_stride": [16, 8],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 6,
    "num_conv_pos_embedding_groups": 3,
}
STABLE = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "wav2vec2-group": ("Wav2Vec2", RAW),
    "wav2vec2-layer": ("Wav2Vec2", RAW | STABLE),
    "hubert": ("Hubert", RAW | STABLE),
    "wavlm": ("WavLM", RAW | STABLE | {"num_buckets": 20, "max_bucket_distance": 40}),
    "wav2vec2-bert": ("Wav2Vec2Bert", {"conv_depthwise_kernel_size": 5}),
}


def make(kind: str, seed: int = 0, *, tokens: dict[str, int] = TOKENS, **changes: Any) -> Any:
    """Every parameter random, so that a forgotten one shows."""
    import transformers

    name, own = KINDS[kind]
    sizes = COMMON | own | {"vocab_size": len(tokens), "pad_token_id": tokens["<pad>"]} | changes
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCTC")(getattr(transformers, f"{name}Config")(**sizes))
    for parameter_name, parameter in model.named_parameters():
        norm = "norm" in parameter_name and parameter_name.endswith("weight")
        parameter.data.normal_(1.0 if norm else 0.0, 0.2)
    return model.eval()


def write(
    model: Any, folder: Path, *, tokens: dict[str, int] = TOKENS, shard: str = "50GB"
) -> Path:
    """The model with its processor's files."""
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "vocab.json").write_text(json.dumps(tokens))
    settings = {
        "tokenizer_class": "Wav2Vec2CTCTokenizer",
        "pad_token": "<pad>",
        "word_delimiter_token": "|",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    extractor(model).save_pretrained(folder)
    return folder


def extractor(model: Any) -> Any:
    from transformers import SeamlessM4TFeatureExtractor, Wav2Vec2FeatureExtractor

    if model.config.model_type == "wav2vec2-bert":
        return SeamlessM4TFeatureExtractor()
    masks = model.config.feat_extract_norm == "layer"
    return Wav2Vec2FeatureExtractor(return_attention_mask=masks)


def waves(*lengths: int, seed: int = 1) -> list[Any]:
    generator = np.random.default_rng(seed)
    return [(0.1 * generator.standard_normal(n) + 0.03).astype(np.float32) for n in lengths]
