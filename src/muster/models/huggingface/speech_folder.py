"""Folders of speech encoders: the config, the weights with a fresh head where there is none, export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from muster.errors import RecipeError
from muster.models.huggingface.config import SPEECH_FAMILIES, ConfigFile
from muster.models.huggingface.speech import Document, SpeechEncoderCTC
from muster.models.huggingface.tensors import (
    SHARD_BYTES,
    Shapes,
    TensorFolder,
    TensorLocation,
    number_format,
    refuse_other_state,
    write_folder,
)
from muster.models.weights import FreshWeights, Region, keyed_generator
from muster.reading import json_file
from muster.reading.text import in_one_line

HEAD, MASK = "lm_head.", "masked_spec_embed"
# torch's two forms of weight normalisation; transformers writes the first, older folders hold the second.
OLDER_NAMES = {
    "parametrizations.weight.original0": "weight_g",
    "parametrizations.weight.original1": "weight_v",
}


def read_document(folder: Path) -> Document:
    """config.json, with what muster cannot train refused by its key."""
    file = ConfigFile(folder, SPEECH_FAMILIES)
    file.only("quantization_config", None, None)
    file.only("conv_pos_batch_norm", False, False)  # statistics of a micro-batch
    file.only("adapter_attn_dim", None, None)  # one small adapter and head per language
    from transformers import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[file.family].from_dict(dict(file.keys))  # type: ignore[index]
    except Exception as error:  # of transformers' own checks
        raise RecipeError(f"model.pretrained: {file.path}: {in_one_line(error, 300)}") from None
    return {**file.keys, "vocab_size": config.vocab_size}


def is_speech_encoder(folder: Path) -> bool:
    try:
        return json_file.read(folder / "config.json").get("model_type") in SPEECH_FAMILIES
    except (OSError, ValueError):
        return False


def has_head(folder: Path) -> bool:
    """Whether the folder's model was fine-tuned with CTC."""
    return f"{HEAD}weight" in TensorFolder(folder, {}, TensorLocation).tensors


class EncoderWeights(TensorFolder):
    """A folder's tensors; the head, where it is new or there is none, and a missing mask embedding are
    drawn from (seed, name)."""

    def __init__(self, folder: Path, document: Document, *, seed: int, new_head: bool) -> None:
        std = float(document.get("initializer_range", 0.02))
        self._drawn = FreshWeights(seed, lambda name: std if name.endswith(".weight") else None)
        self._seed, self._new_head = seed, new_head
        super().__init__(folder, parameter_shapes(document), TensorLocation)

    def read(
        self, name: str, shape: tuple[int, ...], region: Region, device: torch.device
    ) -> Tensor:
        if not self._is_fresh(name):
            return super().read(name, shape, region, device)
        if not name.endswith(MASK):
            return self._drawn.read(name, shape, region, device)
        generator = keyed_generator(self._seed, name, device)
        return torch.empty(shape, device=device).uniform_(generator=generator)[region]

    def _is_fresh(self, name: str) -> bool:
        if name.startswith(HEAD):
            return self._new_head
        return name.endswith(MASK) and self._name(TensorLocation(name)) not in self._holder

    def _check(self, shapes: Shapes) -> None:
        super()._check({n: shape for n, shape in shapes.items() if not self._is_fresh(n)})

    def _name(self, where: TensorLocation) -> str:
        older = where.tensor
        for new, old in OLDER_NAMES.items():
            older = older.replace(new, old)
        names = (super()._name(where), super()._name(TensorLocation(older)))
        return next((name for name in names if name in self._holder), where.tensor)


def export(
    folder: Path,
    document: Document,
    state: Mapping[str, Tensor],
    files: Mapping[str, bytes],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `state` as a folder that transformers' AutoModelForCTC loads, `files` beside it."""
    refuse_other_state(parameter_shapes(document), state)
    config = {k: v for k, v in document.items() if k not in ("torch_dtype", "transformers_version")}
    config |= {"architectures": [_on_meta(document).architecture], "dtype": number_format(state)}
    write_folder(folder, state, TensorLocation, config, files, shard_bytes)


def parameter_shapes(document: Document) -> Shapes:
    return {name: tuple(p.shape) for name, p in _on_meta(document).named_parameters()}


def _on_meta(document: Document) -> SpeechEncoderCTC:
    with torch.device("meta"):
        return SpeechEncoderCTC(document, masks_padding=False)
