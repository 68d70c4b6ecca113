"""Which tensors of a rank other ranks hold too, and a hash of them that is computed where they are.

Replicas apply the same update to the same values, so they are equal bit for bit. A bit that flips in the
memory of one of them, or a device that computes wrong, shows as another hash.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from torch.optim import Optimizer

from muster.parallel.mesh import Mesh
from muster.parallel.optimizers.base import local

LANES = 2**20  # of 8 bytes, hashed at a time: what the hash takes of the device's memory, twice
MULTIPLIER = 6364136223846793005  # odd, so that no bit of an earlier piece is lost
EVERYONE = "all"


class Held(NamedTuple):
    """A tensor of this rank. Ranks that hold the same `part` of the model hold equal tensors."""

    name: str
    tensor: Tensor
    part: str


def held(
    parts: Sequence[nn.Module], optimizer: Optimizer, mesh: Mesh, tied: Iterable[nn.Parameter]
) -> Iterator[Held]:
    """Parameters and the state of their optimizer, as they are in memory. `tied` ones are held by two stages of
    a pipeline."""
    layout, twice = mesh.layout, {id(p) for p in tied}
    # Tensor ranks compute the gradient of what all of them hold each by itself. On GPUs the kernels that were
    # measured to be fastest may differ, and round differently.
    alone = layout.tensor > 1 and mesh.device.type == "cuda"
    own = f" tensor {layout.tensor_rank(mesh.rank)}" if alone else ""
    stage = f"stage {layout.pipeline_rank(mesh.rank)}"
    for module in parts:
        for name, p in module.named_parameters():
            whole = (EVERYONE if id(p) in twice else stage) + own
            yield Held(name, local(p), _part(p, whole))
            for slot, value in optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    # Plain tensors beside a sharded parameter belong to its shard.
                    owner = value if isinstance(value, DTensor) else p
                    yield Held(f"{name} ({slot})", local(value), _part(owner, whole))


def _part(tensor: Tensor, whole: str) -> str:
    """This rank's place along the dimensions of the mesh that shard the tensor."""
    if not isinstance(tensor, DTensor):
        return whole
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert mesh.mesh_dim_names is not None
    assert place is not None
    shards = [
        f"{name} {at}"
        for name, at, placement in zip(mesh.mesh_dim_names, place, tensor.placements, strict=True)
        if not placement.is_replicate()
    ]
    return " ".join([whole, *shards])


def hashes(tensors: Sequence[Tensor]) -> list[int]:
    """64 bits of each tensor; the host waits once for each device."""
    found: dict[int, int] = {}
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        by_device[tensor.device].append(i)
    for device, members in by_device.items():
        longest = max(tensors[i].nbytes for i in members)
        weights = _weights(device, min(LANES, -(-longest // 8)))
        values = torch.stack([_hash(tensors[i], weights) for i in members])
        found |= dict(zip(members, values.tolist(), strict=True))
    return [found[i] for i in range(len(tensors))]


def _weights(device: torch.device, lanes: int) -> Tensor:
    """An odd number for each lane, so that any bit changes the sum, and exchanged values do too. [lanes]"""
    x = torch.arange(1, lanes + 1, device=device) * -7046029254386353131
    x = (x ^ (x >> 32)) * -4658895280553007687
    return (x ^ (x >> 29)) | 1


@torch.no_grad()
def _hash(tensor: Tensor, weights: Tensor) -> Tensor:
    """The sum of its lanes, each times its weight, modulo 2^64: exact in any order. A scalar on the device.
    The upper half of each lane goes into its lower one first: of a product's bits, those below the lowest that
    changed stay as they were."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = torch.full((), data.numel(), dtype=torch.int64, device=tensor.device)
    for piece in data.split(LANES * 8):
        missing = -piece.numel() % 8
        if missing or piece.storage_offset() % 8:
            piece = pad(piece, (0, missing)).clone()
        lanes = piece.view(torch.int64)
        upper = (lanes >> 32) & 0xFFFFFFFF  # without the sign, or x and ~x would be the same
        mixed = (lanes ^ upper).mul_(weights[: lanes.numel()])
        total = total * MULTIPLIER + mixed.sum()
    return total


def by_part(tensors: Iterable[Held]) -> dict[str, list[tuple[str, int]]]:
    """Name and hash of every tensor, by the part of the model that they belong to."""
    tensors = list(tensors)
    found: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for tensor, value in zip(tensors, hashes([t.tensor for t in tensors]), strict=True):
        found[tensor.part].append((tensor.name, value))
    return dict(found)


def combined(values: object) -> str:
    """One short hash of many values."""
    return hashlib.sha256(repr(values).encode()).hexdigest()[:32]
