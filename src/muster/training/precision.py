"""Autocast and the loss scale for float16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from muster.errors import RecipeError
from muster.parallel.dtypes import DTYPES
from muster.parallel.float8 import refuse_device
from muster.parallel.mesh import Mesh


def resolve_precision(asked: str, device: torch.device) -> str:
    """`auto` is bf16 on a GPU that has it, else fp32. V100 and T4 only emulate it. fp8 is bf16 but for
    the layers that `muster.parallel.float8` converts."""
    if asked == "auto":
        gpu = device.type == "cuda"
        return "bf16" if gpu and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    if asked == "fp16" and device.type == "cpu":
        raise RecipeError("training.precision: fp16 has no fast path on a CPU; use fp32 or bf16")
    if asked == "fp8":
        refuse_device(device)
        return "bf16"
    return asked


def shared_precision(asked: str, mesh: Mesh) -> str:
    """The same on all ranks: `auto` is bf16 where every rank's GPU has it."""
    found = mesh.gather(resolve_precision(asked, mesh.device))
    return found[0] if len(set(found)) == 1 else "fp32"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


@dataclass
class LossScale:
    """float16 gradients underflow below 6e-8, so the loss is scaled up and gradients are scaled down.

    Every rank sees the same summed gradient norm, so every rank updates alike.
    """

    value: float = 1.0
    dynamic: bool = False
    good_steps: int = 0
    grow_every: int = 2000

    @classmethod
    def for_precision(cls, precision: str) -> LossScale:
        return cls(2.0**16, dynamic=True) if precision == "fp16" else cls()

    def update(self, finite: bool) -> bool:
        """Adapt to the last step. True if the scale was lowered after an overflow."""
        if not self.dynamic:
            return False
        if finite:
            self.good_steps += 1
            if self.good_steps % self.grow_every == 0:
                self.value *= 2.0
            return False
        self.good_steps = 0
        too_large = self.value > 1.0
        self.value = max(1.0, self.value / 2.0)
        return too_large

    def state(self) -> dict[str, float]:
        return {"value": self.value, "good_steps": self.good_steps}

    def load(self, state: dict[str, float]) -> None:
        if self.dynamic and state:
            self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
