"""Applied to a model before it is sharded: norms and activation checkpointing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from muster.errors import RecipeError
from muster.models.norm import MaskedBatchNorm
from muster.recipe.schema import Recipe

Checkpointing = Literal["none", "full", "selective"]

# Matrix products and attention: expensive to recompute.
SAVED_OPS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}

VARLEN = "torch_attn._varlen_attn.default"  # registered when it is first imported


def find_blocks(
    model: nn.Module, names: Sequence[str], key: str, *, stage: bool = False
) -> list[nn.Module]:
    """The modules of those classes; a name that matches none is an error that lists the classes there
    are, except in a `stage` of a pipeline, which holds only some of the model."""
    found = [m for m in model.modules() if type(m).__name__ in names]
    missing = [name for name in names if name not in {type(m).__name__ for m in found}]
    if missing and not stage:
        present = {
            type(m).__name__ for m in model.modules() if any(True for _ in m.parameters())
        } - {type(model).__name__}
        raise RecipeError(
            f"{key}: no layer of class {', '.join(missing)} in {type(model).__name__}; "
            f"it has {', '.join(sorted(present))}"
        )
    return found


def checkpoint_activations(blocks: Sequence[nn.Module], mode: Checkpointing) -> None:
    """Recompute each block's activations in the backward pass instead of saving them.

    The forward method is replaced, not the module, so that parameter names do not change.
    """
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for block in blocks:
        block.forward = _checkpointed(block.forward, options)  # type: ignore[method-assign]


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    return run


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op in SAVED_OPS or str(op) == VARLEN
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def prepare_norms(model: nn.Module, recipe: Recipe) -> None:
    """SyncBatchNorm where the recipe sets it; activation checkpointing is refused, since recomputation
    would update the running statistics again."""
    norms = [module for module in model.modules() if isinstance(module, MaskedBatchNorm)]
    if norms and recipe.training.activation_checkpointing != "none":
        raise RecipeError(
            "training.activation_checkpointing: recomputing a block would update the running "
            "statistics of batch normalisation twice; set it to none"
        )
    for norm in norms:
        norm.sync = recipe.distributed.sync_batchnorm
