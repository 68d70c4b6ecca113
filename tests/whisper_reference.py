"""Small random Whispers of transformers, to compare ours with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import WhisperConfig as TheirConfig
from transformers import WhisperForConditionalGeneration

from muster.models.weights import Weights
from muster.models.whisper.folder import WhisperWeights, read_config
from muster.models.whisper.model import Whisper

# Text is 0 … 59, then the special tokens, then <|0.00|> … <|1.58|>.
END, START, NO_TIMESTAMPS, FIRST_TIMESTAMP, VOCAB = 60, 61, 69, 70, 150
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 56,
    "decoder_ffn_dim": 72,
    "num_mel_bins": 10,
    "max_source_positions": 30,
    "max_target_positions": 24,
    "pad_token_id": END,
    "bos_token_id": END,
    "eos_token_id": END,
    "decoder_start_token_id": START,
    "begin_suppress_tokens": None,
}


def make(seed: int = 0, ending: float = 0.0, **changes: Any) -> WhisperForConditionalGeneration:
    """Every parameter random, biases and norms too, so that a forgotten one shows; the decoder's
    positions strong, so that it says something new each time; `ending` added to the end's logit."""
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(TheirConfig(**SIZES | changes)).eval()
    for name, parameter in model.named_parameters():
        norm = "norm" in name and name.endswith("weight")
        spread = 1.0 if name == "model.decoder.embed_positions.weight" else 0.2
        parameter.data.normal_(1.0 if norm else 0.0, spread)
    constant = model.model.decoder.layer_norm.bias.data
    model.proj_out.weight.data[END] += ending * constant / constant.square().sum()
    return model


def fill(model: Whisper, weights: Weights) -> Whisper:
    state = {
        name: weights.read(name, tuple(p.shape), (slice(None),) * p.ndim, torch.device("cpu"))
        for name, p in model.named_parameters()
    }
    model.load_state_dict(state, assign=True)
    return model.eval()


def load(folder: Path) -> Whisper:
    config = read_config(folder)
    return fill(Whisper(config), WhisperWeights(folder, config))


def ours(theirs: WhisperForConditionalGeneration, folder: Path) -> Whisper:
    theirs.save_pretrained(folder)
    return load(folder)


def features(batch: int = 3, frames: int = 60, seed: int = 1) -> Tensor:
    """[batch, frames, mels]"""
    return torch.randn(batch, frames, 10, generator=torch.Generator().manual_seed(seed))


def tokens(batch: int = 3, time: int = 20, seed: int = 2) -> Tensor:
    return torch.randint(0, END, (batch, time), generator=torch.Generator().manual_seed(seed))


def their_logits(theirs: WhisperForConditionalGeneration, heard: Tensor, said: Tensor) -> Tensor:
    logits: Tensor = theirs(heard.transpose(1, 2), decoder_input_ids=said).logits
    return logits
