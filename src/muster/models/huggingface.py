"""Hugging Face folders: finding one, reading the weights a rank needs from it, writing one."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from muster.errors import CheckpointError, MusterError, RecipeError
from muster.models.decoder import Decoder, DecoderConfig
from muster.models.huggingface_config import (
    family_for,
    read_config,
    read_family,
    write_config,
)
from muster.models.weights import Region

__all__ = ["FolderWeights", "export", "locate", "read_config", "read_family"]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
SHARD_BYTES = 5 * 10**9
FLOATS = ("F64", "F32", "F16", "BF16")

ROTARY_NAMES = {
    "embed.tokens": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "model.layers.{}.input_layernorm",
    "attention.q": "model.layers.{}.self_attn.q_proj",
    "attention.k": "model.layers.{}.self_attn.k_proj",
    "attention.v": "model.layers.{}.self_attn.v_proj",
    "attention.o": "model.layers.{}.self_attn.o_proj",
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


class Place(NamedTuple):
    """Where a parameter of ours lies: piece `piece` of `pieces` along a tensor's outputs."""

    tensor: str
    piece: int = 0
    pieces: int = 1
    transposed: bool = False  # GPT-2 keeps its matrices as [in, out]

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The whole tensor's shape, as the file has it."""
        whole = (ours[0] * self.pieces, *ours[1:])
        return whole[::-1] if self.transposed else whole

    def region(self, ours: tuple[int, ...], region: Region) -> Region:
        """`region` of our parameter, in the file's tensor."""
        bounds = [s.indices(n)[:2] for s, n in zip(region, ours, strict=True)]
        offset = self.piece * ours[0]
        bounds[0] = (bounds[0][0] + offset, bounds[0][1] + offset)
        slices = tuple(slice(*bound) for bound in bounds)
        return slices[::-1] if self.transposed else slices


def place(family: str, name: str) -> Place:
    """Where the parameter `name` of a Decoder lies in a folder of `family`."""
    module, _, kind = name.rpartition(".")
    layer = re.match(r"blocks\.(\d+)\.", module)
    if layer:
        module = module[layer.end() :]
    names = GPT2_NAMES if family == "gpt2" else ROTARY_NAMES
    tensor = f"{names[module]}.{kind}".format(layer and layer.group(1))
    if family != "gpt2" or not module.startswith(("attention.", "feed_forward.")):
        return Place(tensor)
    piece, pieces = (FUSED.index(module), len(FUSED)) if module in FUSED else (0, 1)
    return Place(tensor, piece, pieces, transposed=kind == "weight")


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = Decoder(config)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def locate(spec: str, *, fetch: bool = True) -> Path:
    """The folder `spec`, or the hub's model of that id, which is fetched unless it is here."""
    folder = Path(spec).expanduser()
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", spec):
        raise RecipeError(f"model.pretrained: there is no folder {spec}; give one that exists")
    try:
        from huggingface_hub import snapshot_download

        wanted = ["config.json", "model*.safetensors", INDEX, *TOKENIZER_FILES]
        return Path(snapshot_download(spec, allow_patterns=wanted, local_files_only=not fetch))
    except Exception as error:  # of several libraries: no such id, no access, no network
        reason = str(error).strip().splitlines()
        raise RecipeError(
            f"model.pretrained: there is no folder {spec}, and the Hugging Face hub gave no model "
            f"of that id ({type(error).__name__}: {reason[0] if reason else 'no reason given'}); "
            "check the name, or copy the model's folder here and name that"
        ) from None


def tokenizer_of(folder: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """A folder's tokenizer files, and the special token ids that its config.json gives."""
    files = {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
    keys = {}
    if (folder / "config.json").is_file():
        keys = json.loads((folder / "config.json").read_text())
    ids = {name: keys[name] for name in TOKEN_IDS if name in keys}
    return {name: path.read_bytes() for name, path in files.items()}, ids


class FolderWeights:
    """A folder's safetensors as a decoder's initial weights, read region by region.

    Files are memory-mapped: only the bytes of the regions asked for are ever read.
    """

    def __init__(self, folder: Path, config: DecoderConfig) -> None:
        self.folder, self.config = folder, config
        self.family = read_family(folder)
        self._files: dict[str, Any] = {}
        self._holder = self._tensors()
        self.check()

    def check(self) -> None:
        """Every file, tensor, shape and number format that the model needs, from headers alone."""
        missing, wrong = [], []
        for name, shape in parameter_shapes(self.config).items():
            where = place(self.family, name)
            tensor = self._name(where)
            if tensor not in self._holder:
                missing.append(tensor)
                continue
            header = self._slice(tensor)
            found, expected = tuple(header.get_shape()), where.shape(shape)
            if found != expected:
                wrong.append(f"{tensor} is {list(found)}, expected {list(expected)}")
            elif header.get_dtype() not in FLOATS:
                wrong.append(f"{tensor} holds {header.get_dtype()}, expected {', '.join(FLOATS)}")
        if missing:
            raise CheckpointError(
                f"{self.folder} lacks {_few(dict.fromkeys(missing))}, which its config.json asks "
                "for; copy the whole model again"
            )
        if wrong:
            raise CheckpointError(
                f"{self.folder} does not fit its config.json: {_few(dict.fromkeys(wrong))}; "
                "copy the whole model again"
            )

    def read(
        self, name: str, shape: tuple[int, ...], region: Region, device: torch.device
    ) -> Tensor:
        where = place(self.family, name)
        part = where.region(shape, region)
        if any(s.start >= s.stop for s in part):  # a rank that holds nothing of it
            size = [max(0, s.stop - s.start) for s in part]
            return torch.empty(size[::-1] if where.transposed else size, device=device)
        value = self._slice(self._name(where))[part]
        value = value.T if where.transposed else value
        return value.to(device, torch.float32, copy=True, memory_format=torch.contiguous_format)

    def _tensors(self) -> dict[str, str]:
        """Tensor → the file that holds it, every file present."""
        index = self.folder / INDEX
        if index.is_file():
            try:
                held = dict(json.loads(index.read_text())["weight_map"])
            except (ValueError, KeyError, TypeError):
                raise CheckpointError(f"{index} is damaged; copy it again") from None
            absent = [f for f in sorted(set(held.values())) if not (self.folder / f).is_file()]
            if absent:
                raise CheckpointError(
                    f"{self.folder} lacks {_few(absent)}, which its {INDEX} names; copy them again"
                )
            return held
        if not (self.folder / WEIGHTS).is_file():
            raise CheckpointError(
                f"{self.folder} has neither {WEIGHTS} nor {INDEX}; muster reads safetensors only: "
                "load the model in transformers and save_pretrained it again"
            )
        return dict.fromkeys(self._open(WEIGHTS).keys(), WEIGHTS)

    def _name(self, where: Place) -> str:
        """Some folders hold the bare model, without the first part of each name."""
        if where.tensor in self._holder:
            return where.tensor
        bare = where.tensor.split(".", 1)[1]
        return bare if bare in self._holder else where.tensor

    def _open(self, name: str) -> Any:
        if name not in self._files:
            try:
                self._files[name] = safe_open(self.folder / name, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{self.folder / name} is damaged or cut short ({error}); copy it again"
                ) from None
        return self._files[name]

    def _slice(self, tensor: str) -> Any:
        try:
            return self._open(self._holder[tensor]).get_slice(tensor)
        except SafetensorError:
            raise CheckpointError(
                f"{self.folder / self._holder[tensor]} has no {tensor}, though {INDEX} says so; "
                "copy it again"
            ) from None


def export(
    folder: Path,
    config: DecoderConfig,
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
    family = family_for(config, family)
    _refuse_other_state(config, state)
    tensors: dict[str, list[tuple[int, str]]] = {}
    for name in state:
        where = place(family, name)
        tensors.setdefault(where.tensor, []).append((where.piece, name))
    shards = _shards(tensors, state, shard_bytes)
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    with new_folder(folder) as part:
        holder: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            file = WEIGHTS if len(shards) == 1 else file
            values = {
                t: _gathered(family, [n for _, n in sorted(tensors[t])], state) for t in shard
            }
            save_file(values, part / file, metadata={"format": "pt"})
            holder |= dict.fromkeys(shard, file)
        if len(shards) > 1:
            total = sum(t.numel() * t.element_size() for t in state.values())
            _write_json(part / INDEX, {"metadata": {"total_size": total}, "weight_map": holder})
        for name, content in (files or {}).items():
            (part / name).write_bytes(content)
        _write_json(part / "config.json", write_config(config, family, dtype) | dict(keys or {}))


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A sibling to write into, which takes the name `folder` once all of it is there."""
    folder = folder.absolute()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise MusterError(f"{folder} exists and is not an empty folder; name a new one")
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        yield part
        part.rename(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} could not be written ({error}); nothing of it was kept; free some space or "
            "name a folder elsewhere"
        ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _shards(
    tensors: Mapping[str, list[tuple[int, str]]], state: Mapping[str, Tensor], shard_bytes: int
) -> list[list[str]]:
    """Names in order, a new file before one would outgrow `shard_bytes`."""
    shards: list[list[str]] = []
    room = 0
    for tensor, parts in tensors.items():
        size = sum(state[name].numel() * state[name].element_size() for _, name in parts)
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= size
    return shards


def _gathered(family: str, names: list[str], state: Mapping[str, Tensor]) -> Tensor:
    """One tensor of the file from our parameters, in the order of its pieces."""
    whole = torch.cat([state[name].detach().cpu() for name in names])
    return (whole.T if place(family, names[0]).transposed else whole).contiguous()


def _refuse_other_state(config: DecoderConfig, state: Mapping[str, Tensor]) -> None:
    expected = parameter_shapes(config)
    found = {name: tuple(value.shape) for name, value in state.items()}
    differ = [n for n in expected | found if expected.get(n) != found.get(n)]
    if differ:
        raise CheckpointError(f"the model to export does not fit its config in {_few(differ)}")


def _write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")


def _few(names: Iterable[str], limit: int = 3) -> str:
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
