"""Low-rank adapters through peft: W is frozen, and the low-rank product B·A is trained.

A layer `….q` becomes `….q.base_layer` with `….q.lora_A.default` [rank, in] and
`….q.lora_B.default` [out, rank], and computes W x + alpha / rank · B A x.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from muster.errors import CheckpointError, MusterError
from muster.models.configs import DecoderConfig, WhisperConfig
from muster.models.huggingface.config import family_for
from muster.models.huggingface.folder import place
from muster.models.huggingface.tensors import TensorLocation, new_folder
from muster.models.huggingface.transformers_config import TransformersConfig
from muster.models.huggingface.transformers_model import PREFIX, TransformersLM, stacks
from muster.models.lora_targets import SHORT_NAMES, WHISPER_NAMES, settled
from muster.models.weights import Region, Weights, keyed_generator
from muster.models.whisper.model import Whisper

BASE = ".base_layer"
A, B = ".lora_A.default.weight", ".lora_B.default.weight"


def attach(
    model: nn.Module, *, rank: int, alpha: float, dropout: float, targets: Sequence[str]
) -> None:
    """In place, on a Decoder, a part of one, or a Whisper, on any device. Only adapters are then
    trained; a frozen encoder gets none."""
    model.requires_grad_(False)
    blocks, names = _layers(model)
    if not names:  # a part that holds an end of the model only
        return
    wanted = settled(targets, names)
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise MusterError("model.lora needs peft: pip install 'muster-train[peft]'") from None
    modules = rf"{blocks}\..+\.({'|'.join(names[target] for target in wanted)})"
    options: dict[str, Any] = {"r": rank, "lora_alpha": alpha, "lora_dropout": dropout}
    inject_adapter_in_model(LoraConfig(target_modules=modules, **options), model)


def _layers(model: nn.Module) -> tuple[str, dict[str, str]]:
    """A pattern for where a model's blocks are, and the last part of their layers' names by the
    name that a recipe gives them."""
    if isinstance(model, Whisper):
        learning = "decoder" if model.freeze_encoder else "(encoder|decoder)"
        return rf"model\.{learning}\.layers", WHISPER_NAMES
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if isinstance(model, TransformersLM):
        blocks = stacks(model)
        last = [n.rpartition(".")[2] for n in linear if re.match(rf"{blocks}\.", n)]
        return blocks, {SHORT_NAMES.get(name, name): name for name in last}
    last = [name.rpartition(".")[2] for name in linear if name.startswith("blocks.")]
    return "blocks", dict(zip(last, last, strict=True))


class AdapterWeights:
    """The base's weights under their names in a model with adapters; A random, B zero.

    A is drawn as peft draws it, from (seed, name) alone, so that any layout starts alike.
    """

    def __init__(self, base: Weights, seed: int) -> None:
        self.base, self.seed = base, seed

    def read(
        self, name: str, shape: tuple[int, ...], region: Region, device: torch.device
    ) -> Tensor:
        if name.endswith(B):
            return torch.zeros(shape, device=device)[region].clone()
        if not name.endswith(A):
            return self.base.read(name.replace(f"{BASE}.", "."), shape, region, device)
        bound = 1 / math.sqrt(shape[1])  # Kaiming's uniform for a = √5
        generator = keyed_generator(self.seed, name, device)
        whole = torch.empty(shape, device=device)
        return whole.uniform_(-bound, bound, generator=generator)[region]


def merged(state: Mapping[str, Tensor], alpha: float, rank: int) -> dict[str, Tensor]:
    """W + alpha / rank · B A, under the names a model without adapters has."""
    whole: dict[str, Tensor] = {}
    for name, value in state.items():
        if name.endswith((A, B)):
            continue
        layer, found, kind = name.partition(f"{BASE}.")
        if found and kind == "weight":
            a, b = state[layer + A], state[layer + B]
            value = (value.float() + alpha / rank * (b.float() @ a.float())).to(value.dtype)
        whole[name.replace(f"{BASE}.", ".")] = value
    return whole


def export_adapter(
    folder: Path,
    config: DecoderConfig | TransformersConfig | WhisperConfig,
    state: Mapping[str, Tensor],
    *,
    rank: int,
    alpha: float,
    base: str,
    family: str | None = None,
) -> None:
    """The adapters of `state` as a folder that peft loads onto the transformers model `base`.

    GPT-2 keeps q, k and v in one matrix. Their adapters become one of the summed rank: the As stand
    one above the other, the Bs in blocks, and alpha grows with the rank so that the product stays.
    """
    whisper = isinstance(config, WhisperConfig)
    family = family_for(config, family) if isinstance(config, DecoderConfig) else None
    if family is None:
        state = {name.removeprefix(PREFIX): value for name, value in state.items()}
    layers = [name.removesuffix(A) for name in state if name.endswith(A)]
    if not layers:
        raise CheckpointError("this model has no adapters to export; export the whole model")
    fused: dict[str, list[str]] = {}
    for layer in layers:
        module = _place(family, layer).tensor.removesuffix(".weight")
        fused.setdefault(module, []).append(layer)
    values: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for module, parts in fused.items():
        a, b = _stacked(family, parts, state)
        values[f"base_model.model.{module}.lora_A.weight"] = a
        values[f"base_model.model.{module}.lora_B.weight"] = b
        ranks[".".join(module.split(".")[-2:])] = len(a)  # such as attn.c_attn, self_attn.q_proj
    document = {
        "peft_type": "LORA",
        "task_type": None if whisper else "CAUSAL_LM",  # peft's class for seq2seq wants input_ids
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": _pattern(layers) if whisper else sorted(ranks),
        "rank_pattern": {name: r for name, r in ranks.items() if r != rank},
        "alpha_pattern": {name: alpha * r / rank for name, r in ranks.items() if r != rank},
        "fan_in_fan_out": family == "gpt2",
    }
    with new_folder(folder) as part:
        save_file(values, part / "adapter_model.safetensors", metadata={"format": "pt"})
        (part / "adapter_config.json").write_text(json.dumps(document, indent=2) + "\n")


def _pattern(layers: list[str]) -> str:
    """Exactly those modules of a Whisper, whatever the number of their layer."""
    kinds = {re.sub(r"\.\d+\.", ".N.", layer) for layer in layers}
    return "|".join(sorted(re.escape(kind).replace("N", r"\d+") for kind in kinds))


def _place(family: str | None, layer: str) -> TensorLocation:
    """`family` None: the names are transformers' own."""
    name = f"{layer}.weight"
    return place(family, name) if family else TensorLocation(name)


def _stacked(
    family: str | None, layers: list[str], state: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """A [rank · layers, in] and B [out, rank · layers] of one module, fused where GPT-2 fuses."""
    lows = [state[layer + A].detach().cpu() for layer in layers]
    ups = [state[layer + B].detach().cpu() for layer in layers]
    where = _place(family, layers[0])
    if where.pieces == 1:
        return lows[0].contiguous(), ups[0].contiguous()
    out = len(ups[0])
    b = ups[0].new_zeros(where.pieces * out, sum(len(low) for low in lows))
    column = 0
    for layer, up in zip(layers, ups, strict=True):
        row = _place(family, layer).piece * out
        b[row : row + out, column : column + up.shape[1]] = up
        column += up.shape[1]
    return torch.cat(lows), b
