"""The one place that shows the order in which a model is made parallel."""

from __future__ import annotations

from torch import nn

from muster.errors import RecipeError
from muster.models.norm import MaskedBatchNorm
from muster.parallel.ddp import GradientClock, replicate
from muster.parallel.engine import Engine, MakeOptimizer, TorchEngine
from muster.parallel.mesh import Mesh
from muster.recipe.schema import Distributed


def apply(
    model: nn.Module, mesh: Mesh, options: Distributed, make_optimizer: MakeOptimizer
) -> Engine:
    """Move to the device, then replicate. Later techniques take their place in this list."""
    layout = mesh.layout
    if layout.world != layout.replicate:
        raise RecipeError(f"distributed.strategy: {layout} is not supported; this version has ddp")
    _synchronise_norms(model, options.sync_batchnorm)
    model.to(mesh.device)
    wrapped: nn.Module = model
    clock: GradientClock | None = None
    if layout.replicate > 1:
        wrapped, clock = replicate(
            model,
            mesh,
            bucket_mb=options.bucket_mb,
            find_unused_parameters=options.find_unused_parameters,
        )
    return TorchEngine(wrapped, model, make_optimizer(model.named_parameters()), clock)


def _synchronise_norms(model: nn.Module, sync: bool) -> None:
    for module in model.modules():
        if isinstance(module, MaskedBatchNorm):
            module.sync = sync
