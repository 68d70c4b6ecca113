"""Hugging Face folders: finding one, reading the weights a rank needs from it, writing one."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster.models.configs import DecoderConfig
from muster.models.decoder import Decoder
from muster.models.huggingface import transformers_config as theirs
from muster.models.huggingface.config import (
    FAMILIES,
    ConfigFile,
    UnsupportedSettingError,
    family_for,
    read_config,
    read_family,
    write_config,
)
from muster.models.huggingface.locate import TOKENIZER_FILES, locate
from muster.models.huggingface.tensors import (
    SHARD_BYTES,
    TensorFolder,
    TensorLocation,
    number_format,
    refuse_other_state,
    write_folder,
)

__all__ = ["FolderWeights", "export", "locate", "read_any", "read_config", "read_family"]

AnyConfig = DecoderConfig | theirs.TransformersConfig

log = logging.getLogger(__name__)

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

ROTARY_NAMES = {
    "embed.tokens": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "model.layers.{}.input_layernorm",
    "attention.q": "model.layers.{}.self_attn.q_proj",
    "attention.k": "model.layers.{}.self_attn.k_proj",
    "attention.v": "model.layers.{}.self_attn.v_proj",
    "attention.o": "model.layers.{}.self_attn.o_proj",
    "attention.q_norm": "model.layers.{}.self_attn.q_norm",
    "attention.k_norm": "model.layers.{}.self_attn.k_norm",
    "feed_forward_norm": "model.layers.{}.post_attention_layernorm",
    "feed_forward.gate": "model.layers.{}.mlp.gate_proj",
    "feed_forward.up": "model.layers.{}.mlp.up_proj",
    "feed_forward.down": "model.layers.{}.mlp.down_proj",
}
GPT2_NAMES = {
    "embed.tokens": "transformer.wte",
    "embed.positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "attention_norm": "transformer.h.{}.ln_1",
    "attention.q": "transformer.h.{}.attn.c_attn",
    "attention.k": "transformer.h.{}.attn.c_attn",
    "attention.v": "transformer.h.{}.attn.c_attn",
    "attention.o": "transformer.h.{}.attn.c_proj",
    "feed_forward_norm": "transformer.h.{}.ln_2",
    "feed_forward.up": "transformer.h.{}.mlp.c_fc",
    "feed_forward.down": "transformer.h.{}.mlp.c_proj",
}
FUSED = ("attention.q", "attention.k", "attention.v")  # GPT-2's c_attn, in this order


def place(family: str, name: str) -> TensorLocation:
    """The tensor of a Decoder's parameter `name` in a folder of `family`."""
    module, _, kind = name.rpartition(".")
    layer = re.match(r"blocks\.(\d+)\.", module)
    if layer:
        module = module[layer.end() :]
    names = GPT2_NAMES if family == "gpt2" else ROTARY_NAMES
    tensor = f"{names[module]}.{kind}".format(layer and layer.group(1))
    if family != "gpt2" or not module.startswith(("attention.", "feed_forward.")):
        return TensorLocation(tensor)
    piece, pieces = (FUSED.index(module), len(FUSED)) if module in FUSED else (0, 1)
    return TensorLocation(tensor, piece, pieces, transposed=kind == "weight")


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = Decoder(config)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def tokenizer_of(folder: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """A folder's tokenizer files, and the special token ids that its config.json gives."""
    files = {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
    keys = {}
    if (folder / "config.json").is_file():
        keys = ConfigFile(folder, None).keys
    ids = {name: keys[name] for name in TOKEN_IDS if name in keys}
    return {name: path.read_bytes() for name, path in files.items()}, ids


class FolderWeights(TensorFolder):
    """A folder's safetensors as a decoder's initial weights, read region by region."""

    def __init__(self, folder: Path, config: DecoderConfig) -> None:
        self.config = config
        super().__init__(folder, parameter_shapes(config), partial(place, read_family(folder)))


def read_any(
    folder: Path, key: str, dropout: float, *, trust_remote_code: bool = False
) -> tuple[str, AnyConfig]:
    """The family and the architecture of a folder, or of a config.json: a Decoder's, or else one that
    transformers builds, for other families and for settings that the Decoder does not have. `key` is the
    recipe's."""
    file = ConfigFile(folder, None, key=key)
    if file.family in FAMILIES:
        try:
            return str(file.family), dataclasses.replace(read_config(folder, key), dropout=dropout)
        except UnsupportedSettingError as error:
            log.info("%s; trained as transformers' own module", str(error).rpartition("; ")[0])
    found = theirs.read_transformers_config(
        file, dropout=dropout, trust_remote_code=trust_remote_code
    )
    if found.code is not None:
        log.warning("running the Python code in %s, as model.trust_remote_code says", found.code)
    return str(file.family), found


def folder_weights(folder: Path, config: AnyConfig) -> TensorFolder:
    if isinstance(config, DecoderConfig):
        return FolderWeights(folder, config)
    from muster.models.huggingface.transformers_weights import TransformersWeights

    return TransformersWeights(folder, config)


def export(
    folder: Path,
    config: AnyConfig,
    state: Mapping[str, Tensor],
    *,
    family: str | None = None,
    keys: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `state`, a whole Decoder's, as a folder that transformers loads.

    `family` is the model_type it came from; None takes one that can express the config.
    `keys` join config.json (special token ids), `files` lie beside it (a tokenizer's).
    """
    if not isinstance(config, DecoderConfig):
        from muster.models.huggingface import transformers_weights

        transformers_weights.export(
            folder, config, state, keys=keys, files=files, shard_bytes=shard_bytes
        )
        return
    family = family_for(config, family)
    refuse_other_state(parameter_shapes(config), state)
    document = write_config(config, family, number_format(state)) | dict(keys or {})
    write_folder(folder, state, partial(place, family), document, files or {}, shard_bytes)
