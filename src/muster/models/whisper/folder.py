"""Hugging Face's Whisper folders: the config, the weights, what not to say; and writing one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster.errors import RecipeError
from muster.models.configs import WhisperConfig
from muster.models.huggingface.config import ConfigFile
from muster.models.huggingface.generation import FILE as GENERATION_FILE
from muster.models.huggingface.generation import read_keys
from muster.models.huggingface.tensors import (
    SHARD_BYTES,
    Shapes,
    TensorFolder,
    TensorLocation,
    number_format,
    refuse_other_state,
    write_folder,
)
from muster.models.whisper.model import Whisper

KEYS = {
    "vocab": "vocab_size",
    "width": "d_model",
    "encoder_layers": "encoder_layers",
    "encoder_heads": "encoder_attention_heads",
    "encoder_hidden": "encoder_ffn_dim",
    "decoder_layers": "decoder_layers",
    "decoder_heads": "decoder_attention_heads",
    "decoder_hidden": "decoder_ffn_dim",
    "mels": "num_mel_bins",
    "source_positions": "max_source_positions",
    "target_positions": "max_target_positions",
}


def read_config(folder: Path, key: str = "model.pretrained") -> WhisperConfig:
    """The architecture, from config.json alone. Dropout does not come along: it is the recipe's."""
    file = ConfigFile(folder, ("whisper",), key=key)
    file.only("quantization_config", None, None)
    file.only("activation_function", "gelu", "gelu")
    file.only("tie_word_embeddings", True, True)
    file.only("is_encoder_decoder", True, True)
    try:
        return WhisperConfig(**{ours: file.size(theirs) for ours, theirs in KEYS.items()})
    except ValueError as error:
        raise RecipeError(f"{key}: {file.path}: {error}") from None


@dataclass(frozen=True)
class Generation:
    """How a folder's model is meant to be searched."""

    suppress: tuple[int, ...] = ()  # tokens never to say
    suppress_first: tuple[int, ...] = ()  # … not to begin with
    keys: dict[str, Any] = field(default_factory=dict)  # all of generation_config.json

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Generation:
        return cls(tuple(saved["suppress"]), tuple(saved["suppress_first"]), saved["keys"])


def read_generation(folder: Path) -> Generation:
    """From generation_config.json or, in older folders without one, config.json."""
    path = folder / GENERATION_FILE
    if not path.is_file():
        found = ConfigFile(folder, ("whisper",))
        return Generation(*_suppressed(found.path, found.keys))
    keys = read_keys(folder)
    return Generation(*_suppressed(path, keys), keys)


def _suppressed(path: Path, keys: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    def tokens(key: str) -> tuple[int, ...]:
        value = keys.get(key) or ()
        if not isinstance(value, (list, tuple)) or not all(
            isinstance(token, int) and token >= 0 for token in value
        ):
            raise RecipeError(
                f"model.pretrained: {path} has {key} = {json.dumps(value)}; muster reads a list of "
                "token ids; correct it there"
            )
        return tuple(value)

    return tokens("suppress_tokens"), tokens("begin_suppress_tokens")


class WhisperWeights(TensorFolder):
    """A folder's safetensors as Whisper's initial weights, read region by region."""

    def __init__(self, folder: Path, config: WhisperConfig) -> None:
        self.config = config
        super().__init__(folder, parameter_shapes(config), TensorLocation)


def export(
    folder: Path,
    config: WhisperConfig,
    state: Mapping[str, Tensor],
    files: Mapping[str, bytes],
    keys: Mapping[str, Any],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `state`, a whole Whisper's, as a folder that transformers loads.

    `keys` join config.json (special token ids), `files` lie beside it (the processor's, and
    generation_config.json).
    """
    refuse_other_state(parameter_shapes(config), state)
    document = write_config(config, number_format(state)) | dict(keys)
    write_folder(folder, state, TensorLocation, document, files, shard_bytes)


def write_config(config: WhisperConfig, dtype: str) -> dict[str, Any]:
    """What config.json must say for transformers to build the same model.

    Its own defaults for tokens are those of tiny.en, so they are taken back.
    """
    return {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "is_encoder_decoder": True,
        "activation_function": "gelu",
        "tie_word_embeddings": True,
        "dtype": dtype,
        "dropout": config.dropout,
        "num_hidden_layers": config.encoder_layers,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
        **{theirs: getattr(config, ours) for ours, theirs in KEYS.items()},
    }


def parameter_shapes(config: WhisperConfig) -> Shapes:
    with torch.device("meta"):
        model = Whisper(config)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}
