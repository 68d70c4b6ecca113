"""Weights of models that transformers builds: from a folder region by region, fresh by transformers'
own rules, and back into a folder.

A folder's tensors have the module's names, except where transformers converts them on loading: names
of older versions, and experts, which a folder keeps one by one and the module in one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from muster.errors import CheckpointError, MusterError
from muster.models.huggingface.tensors import (
    FLOATS,
    SHARD_BYTES,
    Shapes,
    TensorFolder,
    TensorLocation,
    few,
    number_format,
    refuse_other_state,
    write_folder,
)
from muster.models.huggingface.transformers_config import TransformersConfig
from muster.models.huggingface.transformers_model import PREFIX, TransformersLM, _model_of
from muster.models.weights import Region, keyed_generator

FUSED = (["MergeModulelist"], ["MergeModulelist", "Concatenate"])  # conversions that can be read


class Pieces(NamedTuple):
    """The tensors that a parameter is read from: one, or for each expert those that stand one below
    the other."""

    experts: tuple[tuple[str, ...], ...]
    stacked: bool = False

    @property
    def names(self) -> Iterable[str]:
        return (name for expert in self.experts for name in expert)

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Of each tensor in the folder."""
        if not self.stacked:
            return ours
        return (ours[1] // len(self.experts[0]), *ours[2:])


def meta_model(config: TransformersConfig) -> TransformersLM:
    with torch.device("meta"):
        return TransformersLM(config)


def parameter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


class TransformersWeights(TensorFolder):
    """A folder's safetensors as a model's initial weights."""

    def __init__(self, folder: Path, config: TransformersConfig) -> None:
        self._model = meta_model(config)
        self._pieces: dict[str, Pieces] = {}
        super().__init__(folder, parameter_shapes(self._model), TensorLocation)

    def read(
        self, name: str, shape: tuple[int, ...], region: Region, device: torch.device
    ) -> Tensor:
        pieces = self._pieces[name.removeprefix(PREFIX)]
        sizes = [len(range(*s.indices(n))) for s, n in zip(region, shape, strict=True)]
        if 0 in sizes:
            return torch.empty(sizes, device=device)
        if not pieces.stacked:
            return self._part(pieces.experts[0][0], region, device)
        value = torch.empty(sizes, device=device)
        rows, *inner = region[1:]
        each = shape[1] // len(pieces.experts[0])
        start, stop, _ = rows.indices(shape[1])
        for at, expert in enumerate(range(*region[0].indices(shape[0]))):
            for number, tensor in enumerate(pieces.experts[expert]):
                first, last = max(start, number * each), min(stop, (number + 1) * each)
                if first < last:
                    wanted = (slice(first - number * each, last - number * each), *inner)
                    part = self._part(tensor, wanted, device)
                    value[at, first - start : last - start] = part
        return value

    def _part(self, tensor: str, region: Region, device: torch.device) -> Tensor:
        value: Tensor = self._slice(tensor)[tuple(region)]
        return value.to(device, torch.float32, copy=True, memory_format=torch.contiguous_format)

    def _check(self, shapes: Shapes) -> None:
        """Every tensor has its place, every parameter its tensors, in the right shape."""
        model = self._model.causal_lm
        self._pieces, extra = _assign(model, self._holder, self.folder)
        bare = {name.removeprefix(PREFIX): shape for name, shape in shapes.items()}
        missing = [name for name in bare if name not in self._pieces]
        if missing:
            raise CheckpointError(
                f"{self.folder} lacks {few(missing)}, which its config.json asks for; copy the whole "
                "model again"
            )
        if extra:
            raise CheckpointError(
                f"{self.folder} holds {few(extra)}, which {type(model).__name__} of its config.json does not "
                "have; copy the whole model again"
            )
        wrong = []
        for name, shape in bare.items():
            pieces = self._pieces[name]
            if pieces.stacked and len(pieces.experts) != shape[0]:
                wrong.append(f"{name} has {len(pieces.experts)} experts, expected {shape[0]}")
            for tensor in pieces.names:
                header = self._slice(tensor)
                found, expected = tuple(header.get_shape()), pieces.shape(shape)
                if found != expected:
                    wrong.append(f"{tensor} is {list(found)}, expected {list(expected)}")
                elif header.get_dtype() not in FLOATS:
                    wrong.append(
                        f"{tensor} holds {header.get_dtype()}, expected {', '.join(FLOATS)}"
                    )
        if wrong:
            raise CheckpointError(
                f"{self.folder} does not fit its config.json: {few(wrong)}; copy the whole model again"
            )


def _assign(model: Any, keys: Iterable[str], folder: Path) -> tuple[dict[str, Pieces], list[str]]:
    """The pieces of each parameter, and the tensors of no parameter."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    known = dict(model.state_dict())
    ignored = _not_needed(model)
    found: dict[str, dict[str, list[str]]] = {}
    extra = []
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(
            key, renamings, converters, model.base_model_prefix, known
        )
        if name not in known:
            if not any(re.search(one, name) or re.search(one, key) for one in ignored):
                extra.append(key)
            continue
        found.setdefault(name, {}).setdefault(pattern or "", []).append(key)
    pieces = {}
    for name, sources in found.items():
        converter = next((by_pattern[p] for p in sources if p), None)
        pieces[name] = _pieces(name, sources, converter, folder)
    return pieces, extra


def _pieces(name: str, sources: dict[str, list[str]], converter: Any, folder: Path) -> Pieces:
    if converter is None:
        return Pieces(((next(iter(sources.values()))[0],),))
    operations = [type(operation).__name__ for operation in converter.operations]
    dims = [getattr(operation, "dim", None) for operation in converter.operations]
    if operations not in FUSED or dims not in ([0], [0, 1]) or len(converter.target_patterns) > 1:
        raise CheckpointError(
            f"{folder} keeps {name} in another form than the model ({' and '.join(operations)} on loading), "
            "which muster does not convert; load the model in transformers and save it with "
            "save_original_format=False"
        )
    lists = [sources.get(pattern, []) for pattern in converter.source_patterns]
    if len({len(one) for one in lists}) > 1:
        raise CheckpointError(
            f"{folder} has {' and '.join(str(len(one)) for one in lists)} tensors for the parts of {name}, "
            "expected one of each for every expert; copy the whole model again"
        )
    return Pieces(tuple(zip(*lists, strict=True)), stacked=True)


def _not_needed(model: Any) -> list[str]:
    """Patterns of tensors that a folder may hold and the model computes or shares."""
    buffers = [re.escape(name) + "$" for name, _ in model.named_buffers()]
    ties = [f"^{re.escape(name)}$" for name in model.all_tied_weights_keys]
    return [
        r"rotary_emb\.inv_freq",
        *(model._keys_to_ignore_on_load_unexpected or ()),
        *buffers,
        *ties,
    ]


class FreshTransformersWeights:
    """Drawn by transformers' own rule for each module, one parameter at a time, from (seed, name)
    alone: the same on any layout."""

    def __init__(self, seed: int, config: TransformersConfig) -> None:
        self.seed, self._model = seed, meta_model(config).causal_lm
        for parameter in self._model.parameters():
            parameter._is_hf_initialized = True  # transformers leaves it; the one being read is not

    @torch.no_grad()
    def read(
        self, name: str, shape: tuple[int, ...], region: Region, device: torch.device
    ) -> Tensor:
        from transformers.initialization import guard_torch_init_functions

        bare = name.removeprefix(PREFIX)
        path, _, leaf = bare.rpartition(".")
        owner = self._model.get_submodule(path)
        kept = owner._parameters[leaf]
        whole = nn.Parameter(torch.full(shape, torch.nan, device=device))
        seed = keyed_generator(self.seed, name, torch.device("cpu")).initial_seed()
        owner._parameters[leaf] = whole
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(seed)
                with device, guard_torch_init_functions():
                    for around in _upwards(path):  # as transformers does: the parts, then the whole
                        module = self._model.get_submodule(around)
                        _model_of(self._model, around)._init_weights(module)
        finally:
            owner._parameters[leaf] = kept
        if whole.isnan().any():
            raise MusterError(
                f"transformers has no rule to initialise {bare} of {type(self._model).__name__}; start from "
                "a pretrained folder (model.pretrained)"
            )
        return whole.detach()[region]


def _upwards(path: str) -> Iterable[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def export(
    folder: Path,
    config: TransformersConfig,
    state: Mapping[str, Tensor],
    *,
    keys: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `state`, a whole model's, as save_pretrained of transformers would."""
    from transformers.core_model_loading import revert_weight_conversion

    model = meta_model(config)
    refuse_other_state(parameter_shapes(model), state)
    bare = {name.removeprefix(PREFIX): value.cpu() for name, value in state.items()}
    theirs: dict[str, Tensor] = revert_weight_conversion(model.causal_lm, bare)
    document = config.keys | dict(keys or {}) | {"dtype": number_format(state)}
    document.pop("torch_dtype", None)  # the older name
    document["architectures"] = [type(model.causal_lm).__name__]
    if config.code is not None:
        files = _code_files(Path(config.code)) | dict(files or {})
    write_folder(folder, theirs, TensorLocation, document, files or {}, shard_bytes)


def _code_files(folder: Path) -> dict[str, bytes]:
    """The Python that builds the model, without which its weights are of no use."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.py"))}
