"""Model averaging: the mean of checkpoints, and interpolation of two models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster.errors import CheckpointError
from muster.models.weights import Weights
from muster.observe.results import step_folders, step_of
from muster.training.checkpoint import Saved, open_checkpoint


def last_checkpoints(checkpoint: Path, count: int) -> list[Saved]:
    """So many complete checkpoints of one run, the one that `checkpoint` means first, then back."""
    newest = open_checkpoint(checkpoint)
    root, found, problems = newest.path.resolve().parent, [newest], []
    for folder in step_folders(root):
        if len(found) == count or step_of(folder) >= newest.step:
            continue
        try:
            found.append(open_checkpoint(folder))
        except CheckpointError as error:
            problems.append(f" ({error})")
    if len(found) < count:
        raise CheckpointError(
            f"--average {count}: {root} has {len(found)} complete up to step "
            f"{newest.step}{''.join(problems)}; ask for fewer, or train with a greater "
            "checkpoint.keep and a smaller checkpoint.every_steps"
        )
    runs = [_identity(one) for one in found]
    for one, run in zip(found, runs, strict=True):
        if run != runs[0]:
            raise CheckpointError(
                f"--average {count}: {one.path} is of another run than {newest.path} (their recipes "
                "differ in name, task, seed or model); average the checkpoints of one run"
            )
    return found


def _identity(saved: Saved) -> dict[str, Any]:
    recipe = json.loads((saved.path / "recipe.json").read_text())
    return {key: recipe.get(key) for key in ("name", "task", "seed", "model")}


def mean(states: Iterator[dict[str, Tensor]], count: int) -> dict[str, Tensor]:
    """One at a time besides the sum, which is in float64: what never learnt stays as it is to the
    bit. What is no fraction, such as a counter, is the first's."""
    total = next(states)
    if count == 1:
        return total
    formats = {name: value.dtype for name, value in total.items() if value.is_floating_point()}
    for name in formats:
        total[name] = total[name].double()
    for _ in range(count - 1):
        for name, value in next(states).items():
            if name in formats:
                total[name] += value
    for name, dtype in formats.items():
        total[name] = (total[name] / count).to(dtype)
    return total


def blend(state: dict[str, Tensor], base: Weights, share: float) -> None:
    """In place: linear interpolation, `base` + `share` × (`state` − `base`)."""
    for name, value in state.items():
        if value.is_floating_point():
            everything = (slice(None),) * value.ndim
            start = base.read(name, tuple(value.shape), everything, value.device)
            state[name] = torch.lerp(start, value.float(), share).to(value.dtype)
