"""Where initial weights come from, one parameter at a time, so that no rank ever needs them all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Region = tuple[slice, ...]  # the part of a parameter that a rank holds


class Weights(Protocol):
    def read(
        self, name: str, shape: tuple[int, ...], region: Region, device: torch.device
    ) -> Tensor:
        """`region` of the parameter `name`, whose full shape is `shape`, in float32."""
        ...


def keyed_generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    """Random numbers that depend on (seed, name) and the kind of device alone."""
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]
    return torch.Generator(device).manual_seed(int.from_bytes(key, "big") >> 1)


class FreshWeights:
    """Random, and a function of (seed, name) alone: any layout starts from the same numbers.

    They are drawn on the device that will hold them, so a GPU's differ from a CPU's.
    """

    def __init__(self, seed: int, std: Callable[[str], float | None]) -> None:
        self.seed, self.std = seed, std

    def read(
        self, name: str, shape: tuple[int, ...], region: Region, device: torch.device
    ) -> Tensor:
        std = self.std(name)
        if std is None:
            value = 0.0 if name.endswith("bias") else 1.0
            return torch.full(
                [len(range(*s.indices(n))) for s, n in zip(region, shape, strict=True)],
                value,
                device=device,
            )
        generator = keyed_generator(self.seed, name, device)
        return torch.empty(shape, device=device).normal_(0.0, std, generator=generator)[region]
