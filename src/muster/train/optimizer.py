"""AdamW, and a learning rate that is a function of the optimizer step alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from muster.recipe.schema import Training


def make_optimizer(training: Training, named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Weight decay on matrices only: not on biases, norms and other vectors."""
    trainable = [p for _, p in named if p.requires_grad]
    return AdamW(
        parameter_groups(trainable, training.weight_decay),
        lr=peak_lr(training),
        betas=training.betas,
        eps=training.eps,
        fused=all(p.device.type in ("cuda", "cpu") for p in trainable),
    )


def parameter_groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """By decay and by device mesh: torch's foreach kernels do not mix DTensors of different meshes."""
    groups: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for p in parameters:
        mesh = p.device_mesh if isinstance(p, DTensor) else None
        shape = getattr(p, "ds_shape", p.shape)  # a parameter in ZeRO's partitions is flat
        groups.setdefault((len(shape) >= 2, mesh), []).append(p)
    return [
        {"params": members, "weight_decay": weight_decay if decays else 0.0}
        for (decays, _), members in groups.items()
    ]


def peak_lr(training: Training) -> float:
    """`lr` scaled by global_batch_size / reference_batch_size."""
    if training.lr_scaling == "none" or training.reference_batch_size is None:
        return training.lr
    ratio = training.global_batch_size / training.reference_batch_size
    return training.lr * (ratio if training.lr_scaling == "linear" else math.sqrt(ratio))


def learning_rate(training: Training, step: int, steps: int) -> float:
    """The rate for optimizer step `step` (from 0) of `steps`: warm-up, then the schedule."""
    peak = peak_lr(training)
    if step < training.warmup_steps:
        return peak * (step + 1) / training.warmup_steps
    progress = (step - training.warmup_steps) / max(1, steps - training.warmup_steps)
    progress = min(progress, 1.0)
    shape = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[training.schedule]
    return peak * (training.final_lr_ratio + (1.0 - training.final_lr_ratio) * shape)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Dropout's randomness follows (seed, step, rank), so a checkpoint needs no random state."""
    torch.manual_seed((seed * 1_000_003 + step) * 65_537 + rank)
