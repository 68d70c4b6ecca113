"""Autocast and the loss scale for float16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from muster.errors import RecipeError
from muster.parallel.fsdp import DTYPES


def resolve_precision(asked: str, device: torch.device) -> str:
    """`auto` is bf16 on a GPU that has it, else fp32."""
    if asked == "auto":
        return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    if asked == "fp16" and device.type == "cpu":
        raise RecipeError("training.precision: fp16 has no fast path on a CPU; use fp32 or bf16")
    return asked


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
