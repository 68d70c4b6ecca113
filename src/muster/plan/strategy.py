"""`strategy: auto`: the simplest split that fits."""

from __future__ import annotations

import psutil
import torch

from muster.parallel.layout import Layout, layout_for
from muster.parallel.mesh import Mesh
from muster.recipe.schema import Recipe
from muster.tasks.base import Task

WEIGHT_BYTES = 4  # float32
TRAINED_BYTES = 12  # and for what is trained: its gradient and AdamW's two averages
SHARE = 0.6  # of a device's memory; the rest is for activations, buffers and the context


def choose_layout(recipe: Recipe, task: Task, mesh: Mesh) -> Layout:
    """The recipe's own choice; for `auto`, DDP while a copy fits on the smallest device, else FSDP.

    All ranks choose alike, whatever they have.
    """
    if recipe.distributed.strategy != "auto":
        return layout_for(recipe.distributed, mesh.world)
    smallest = min(mesh.gather(device_bytes(mesh)))
    fits = training_bytes(task) <= SHARE * smallest
    return layout_for(recipe.distributed, mesh.world, "ddp" if fits else "fsdp")


def training_bytes(task: Task) -> int:
    with torch.device("meta"):
        parameters = list(task.build_model().parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return WEIGHT_BYTES * sum(p.numel() for p in parameters) + TRAINED_BYTES * trained


def parameter_count(task: Task) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in task.build_model().parameters())


def device_bytes(mesh: Mesh) -> int:
    """Memory this rank has to itself: its GPU, or its share of the host."""
    if mesh.device.type == "cuda":
        return torch.cuda.get_device_properties(mesh.device).total_memory
    return int(psutil.virtual_memory().total) // mesh.world
