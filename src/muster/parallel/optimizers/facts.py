"""What is known of an optimizer without importing torch."""

from __future__ import annotations

from importlib.util import find_spec

from muster.errors import RecipeError
from muster.parallel.layout import Layout
from muster.recipe.schema import Recipe

BLOCK = 256  # elements of an 8-bit average that share a scale
SMALLEST = 4096  # elements of a shard; smaller ones stay float32, as in torchao
NEWTON_SCHULZ_STEPS = 5  # of muon


def quantizes(numel: int) -> bool:
    """Whether the averages of a shard of so many elements are quantized."""
    return numel >= SMALLEST and numel % BLOCK == 0


def refuse_missing_library(optimizer: str) -> None:
    if optimizer == "adamw-8bit" and find_spec("torchao") is None:
        raise RecipeError(
            "training.optimizer: adamw-8bit needs torchao: pip install 'muster-train[adamw-8bit]'; "
            "or use adamw"
        )


ZERO_OPTIMIZERS = ("adamw", "sgd")  # whose update of an element needs that element alone


def refuse_optimizer(recipe: Recipe, layout: Layout) -> None:
    """What is wrong whatever the model is."""
    name = recipe.training.optimizer
    if layout.zero and name not in ZERO_OPTIMIZERS:
        raise RecipeError(
            f"training.optimizer: {name} needs matrices, and {layout} keeps flat partitions in which "
            f"they have no beginning; use fsdp, which shards as much, or optimizer "
            f"{' or '.join(ZERO_OPTIMIZERS)}"
        )
    refuse_missing_library(name)
    if name == "adamw-8bit" and recipe.distributed.fsdp.cpu_offload:
        raise RecipeError(
            "training.optimizer: adamw-8bit saves memory of the GPU, where distributed.fsdp.cpu_offload "
            "leaves no optimizer state; use adamw, or set cpu_offload to false"
        )
