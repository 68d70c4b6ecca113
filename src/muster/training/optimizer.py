"""The recipe's optimizer, and a learning rate that is a function of the optimizer step alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from muster.parallel.optimizers.adafactor import Adafactor
from muster.parallel.optimizers.adam8bit import AdamW8bit
from muster.parallel.optimizers.muon import Muon
from muster.parallel.optimizers.sgd import SGD
from muster.recipe.training import Training


def make_optimizer(training: Training, named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Weight decay on matrices only: not on biases, norms and other vectors. Muon updates the hidden
    matrices of `NamedParameters`."""
    hidden: frozenset[str] = getattr(named, "hidden", frozenset())
    trainable = [(name in hidden, p) for name, p in named if p.requires_grad]
    groups = parameter_groups([p for _, p in trainable], training.weight_decay)
    lr, betas, eps = peak_lr(training), training.betas, training.eps
    fused = all(p.device.type in ("cuda", "cpu") for _, p in trainable)
    match training.optimizer:
        case "sgd":
            return SGD(groups, lr, training.used_momentum)
        case "adafactor":
            return Adafactor(groups, lr)
        case "adamw-8bit":
            return AdamW8bit(groups, lr, betas, eps)
        case "muon":
            matrices, others = (
                parameter_groups(
                    [p for inside, p in trainable if inside == kind], training.weight_decay
                )
                for kind in (True, False)
            )
            momentum = training.used_momentum
            return Muon(matrices, others, lr, momentum, betas=betas, eps=eps, fused=fused)
        case _:
            return AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused)


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
    begin = training.warmup_steps
    if training.schedule == "wsd":
        begin = max(begin, steps - (training.decay_steps or math.ceil(steps / 10)))
    progress = max(0.0, step - begin) / max(1, steps - begin)
    progress = min(progress, 1.0)
    shape = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "wsd": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[training.schedule]
    return peak * (training.final_lr_ratio + (1.0 - training.final_lr_ratio) * shape)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Dropout's randomness follows (seed, step, rank), so a checkpoint needs no random state."""
    torch.manual_seed((seed * 1_000_003 + step) * 65_537 + rank)
