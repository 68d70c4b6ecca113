"""Small decoders and batches for tests of one strategy at a time. No data, no run directory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from muster.data.loader import IGNORE, Batch, Inputs
from muster.models.configs import DecoderConfig
from muster.models.decoder import Decoder, Part, initial_std
from muster.models.weights import FreshWeights
from muster.parallel.apply import apply
from muster.parallel.engine import Engine, StepFunctions
from muster.parallel.gradients import clip_divisor
from muster.parallel.layout import Layout, layout_for
from muster.parallel.mesh import Mesh
from muster.recipe.schema import Recipe
from muster.training.optimizer import make_optimizer

TIME = 8
LR = 1e-2

# 37 symbols and 22 hidden units divide by 2 and not by 4, or by neither.
GPT = DecoderConfig(37, layers=4, width=16, heads=4, hidden=22, positions=TIME)
LLAMA = DecoderConfig(
    37,
    layers=4,
    width=16,
    heads=4,
    kv_heads=2,
    hidden=22,
    positions=TIME,
    position="rotary",
    norm="rms",
    activation="swiglu",
    bias=False,
    qkv_bias=False,
    tied=False,
)


@dataclass(frozen=True)
class Maker:
    """Builds one decoder, whole or in part, always with the same weights."""

    config: DecoderConfig

    def build_model(self) -> nn.Module:
        return Decoder(self.config)

    def build_part(self, start: int, stop: int) -> nn.Module:
        return Decoder(self.config, Part(start, stop, self.config.layers))

    def weights(self) -> FreshWeights:
        return FreshWeights(7, lambda name: initial_std(self.config, name))


def make_recipe(
    distributed: dict[str, Any] | None = None, *, time: int = TIME, **training: Any
) -> Recipe:
    return Recipe.model_validate(
        {
            "task": "causal-lm",
            "model": {"preset": "tiny"},
            "data": {"sequence_length": time},
            "training": {"steps": 3, "global_batch_size": 8, "precision": "fp32", **training},
            "distributed": distributed or {},
        }
    )


def make_engine(
    mesh: Mesh,
    config: DecoderConfig,
    distributed: dict[str, Any] | None = None,
    **others: Any,
) -> Engine:
    """All ranks of the pool together, as `distributed` says; `others` are options of training."""
    recipe = make_recipe(distributed, **others)
    mesh = mesh.with_layout(layout_for(recipe.distributed, mesh.world))
    return apply(
        Maker(config), mesh, recipe, "fp32", lambda named: make_optimizer(recipe.training, named)
    )


def single(config: DecoderConfig, **training: Any) -> Engine:
    """One process that holds everything."""
    return make_engine(Mesh(0, 0, Layout(), torch.device("cpu"), None), config, **training)


def make_batch(config: DecoderConfig, rows: int, seed: int = 0, time: int = TIME) -> Batch:
    drawn = torch.randint(
        config.vocab, (rows, time + 1), generator=torch.Generator().manual_seed(seed)
    )
    targets = drawn[:, 1:].clone()
    targets[-1, time // 2 :] = IGNORE
    units = int((targets != IGNORE).sum())
    tensors = {"tokens": drawn[:, :-1], "targets": targets}
    return Batch(list(range(rows)), tensors, units, units, targets.numel())


def inputs_of(batch: Batch) -> Inputs:
    """With the positions that context ranks have."""
    shared = {name: batch[name] for name in ("positions",) if name in batch.tensors}
    return Inputs((batch["tokens"],), shared)


def share(batch: Batch, part: int, parts: int) -> Batch:
    """Every `parts`-th row, from `part`."""
    mine = {name: t[part::parts] for name, t in batch.tensors.items()}
    return Batch(batch.ids[part::parts], mine, int((mine["targets"] != IGNORE).sum()), 0, 0)


def micro_batches(mesh: Mesh, distributed: dict[str, Any], batch: Batch, count: int) -> list[Batch]:
    """What this rank computes of `batch`, in `count` pieces."""
    layout = layout_for(make_recipe(distributed).distributed, mesh.world)
    mine = share(batch, layout.data_rank(mesh.rank), layout.data_ranks)
    return [share(mine, i, count) for i in range(count)]


def make_functions(units: int) -> StepFunctions:
    """A sum over tokens, divided by the units of the global batch."""
    return StepFunctions(
        prepare=lambda batch: batch,
        inputs=lambda batch: Inputs((batch["tokens"],)),
        loss=summed_loss,
        autocast=lambda: torch.autocast("cpu", enabled=False),
        scale=1.0 / units,
    )


def summed_loss(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORE, reduction="sum"
    )


def course(engine: Engine, pieces: list[Batch], units: int, steps: int = 3) -> list[float]:
    """Gradient norms of a few steps on the same batch; they depend on every earlier step."""
    norms = []
    for _ in range(steps):
        engine.accumulate(pieces, make_functions(units))
        norm = engine.grad_norm()
        divisor = clip_divisor(norm, 1.0, 1.0)  # the default, which DeepSpeed was told
        engine.step(LR, divisor, norm.isfinite())
        norms.append(float(norm))
        engine.zero_grad()
    return norms


def whole_gradients(engine: Engine) -> dict[str, Tensor]:
    """By name, put together from all ranks that hold a piece."""
    return {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
        for part in engine.parts
        for name, p in part.named_parameters()
        if p.grad is not None
    }
