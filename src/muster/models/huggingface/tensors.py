"""Folders of safetensors in Hugging Face's layout: read region by region, written in shards."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from muster.errors import CheckpointError, MusterError, UnreadableError
from muster.models.weights import Region
from muster.reading import json_file
from muster.reading.files import is_file
from muster.reading.inside import inside
from muster.reading.text import in_one_line

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
FLOATS = ("F64", "F32", "F16", "BF16")

Shapes = Mapping[str, tuple[int, ...]]  # of parameters, by name


class TensorLocation(NamedTuple):
    """Location of a parameter: part `piece` of `pieces` along a tensor's outputs."""

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


class TensorFolder:
    """A folder's safetensors as a model's initial weights.

    Files are memory-mapped: only the bytes of the regions asked for are ever read.
    """

    def __init__(
        self, folder: Path, shapes: Shapes, place: Callable[[str], TensorLocation]
    ) -> None:
        self.folder, self._place = folder, place
        self._files: dict[str, Any] = {}
        self._holder = self._tensors()
        self._check(shapes)

    def read(
        self, name: str, shape: tuple[int, ...], region: Region, device: torch.device
    ) -> Tensor:
        where = self._place(name)
        part = where.region(shape, region)
        if any(s.start >= s.stop for s in part):  # an empty shard
            size = [max(0, s.stop - s.start) for s in part]
            return torch.empty(size[::-1] if where.transposed else size, device=device)
        value = self._slice(self._name(where))[part]
        value = value.T if where.transposed else value
        return value.to(device, torch.float32, copy=True, memory_format=torch.contiguous_format)

    @property
    def tensors(self) -> frozenset[str]:
        """Names of all tensors in the folder's files."""
        return frozenset(self._holder)

    def _check(self, shapes: Shapes) -> None:
        """Every file, tensor, shape and number format that the model needs, from headers alone."""
        missing, wrong = [], []
        for name, shape in shapes.items():
            where = self._place(name)
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
                f"{self.folder} lacks {few(dict.fromkeys(missing))}, which its config.json asks "
                "for; copy the whole model again"
            )
        if wrong:
            raise CheckpointError(
                f"{self.folder} does not fit its config.json: {few(dict.fromkeys(wrong))}; "
                "copy the whole model again"
            )

    def _tensors(self) -> dict[str, str]:
        """Tensor → the file that holds it, every file present."""
        index = self.folder / INDEX
        if index.is_file():
            held = self._indexed(index)
            absent = [f for f in sorted(set(held.values())) if not is_file(self.folder / f)]
            if absent:
                raise CheckpointError(
                    f"{self.folder} lacks {few(absent)}, which its {INDEX} names; copy them again"
                )
            return held
        if not (self.folder / WEIGHTS).is_file():
            raise CheckpointError(
                f"{self.folder} has neither {WEIGHTS} nor {INDEX}; muster reads safetensors only: "
                "load the model in transformers and save_pretrained it again"
            )
        return dict.fromkeys(self._open(WEIGHTS).keys(), WEIGHTS)

    def _indexed(self, index: Path) -> dict[str, str]:
        """Files of this folder, and of no other: the index may be anybody's."""
        try:
            held = json_file.read(index, most=json_file.MOST_TOKENIZER).get("weight_map")
            if not isinstance(held, dict) or not held:
                raise UnreadableError("it has no weight_map, a table of tensors and files")
            for name in {name if isinstance(name, str) else "" for name in held.values()}:
                inside(self.folder, name, index)
        except (UnreadableError, OSError) as error:
            raise CheckpointError(f"{index} is damaged ({error}); copy it again") from None
        return held

    def _name(self, where: TensorLocation) -> str:
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
                    f"{self.folder / name} is damaged or cut short ({in_one_line(error, 300)}); copy it again"
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


def write_folder(
    folder: Path,
    state: Mapping[str, Tensor],
    place: Callable[[str], TensorLocation],
    config: Mapping[str, Any],
    files: Mapping[str, bytes],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """`state` in as many files as it takes, with config.json and `files` beside it."""
    tensors: dict[str, list[tuple[int, str]]] = {}
    for name in state:
        where = place(name)
        tensors.setdefault(where.tensor, []).append((where.piece, name))
    shards = _shards(tensors, state, shard_bytes)
    with new_folder(folder) as part:
        holder: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            file = WEIGHTS if len(shards) == 1 else file
            values = {t: _gathered(place, [n for _, n in sorted(tensors[t])], state) for t in shard}
            save_file(values, part / file, metadata={"format": "pt"})
            holder |= dict.fromkeys(shard, file)
        if len(shards) > 1:
            total = sum(t.numel() * t.element_size() for t in state.values())
            _write_json(part / INDEX, {"metadata": {"total_size": total}, "weight_map": holder})
        for name, content in files.items():
            (part / name).write_bytes(content)
        _write_json(part / "config.json", config)


def refuse_full(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise MusterError(f"{folder} exists and is not an empty folder; name a new one")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A sibling to write into, which takes the name `folder` once all of it is there."""
    folder = folder.absolute()
    refuse_full(folder)
    part = folder.with_name(f".{folder.name[:40]}.{secrets.token_hex(8)}.part")
    with _named(folder):
        part.mkdir(parents=True)
    try:
        with _named(folder):
            yield part
            part.rename(folder)
    finally:  # only what was made here
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} could not be written ({error}); nothing of it was kept; free some space or "
            "name a folder elsewhere"
        ) from None


def refuse_other_state(shapes: Shapes, state: Mapping[str, Tensor]) -> None:
    found = {name: tuple(value.shape) for name, value in state.items()}
    differ = [n for n in {**shapes, **found} if shapes.get(n) != found.get(n)]
    if differ:
        raise CheckpointError(f"the model to export does not fit its config in {few(differ)}")


def number_format(state: Mapping[str, Tensor]) -> str:
    """Such as float32, for config.json."""
    return str(next(iter(state.values())).dtype).removeprefix("torch.")


def few(names: Iterable[str], limit: int = 3) -> str:
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(in_one_line(name) for name in listed[:limit]) + more


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


def _gathered(
    place: Callable[[str], TensorLocation], names: list[str], state: Mapping[str, Tensor]
) -> Tensor:
    """One tensor of the file from our parameters, in the order of its pieces."""
    whole = torch.cat([state[name].detach().cpu() for name in names])
    return (whole.T if place(names[0]).transposed else whole).contiguous()


def _write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")
