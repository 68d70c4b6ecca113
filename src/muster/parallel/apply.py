"""Applies all parallelism to a model, in one order."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn

from muster.errors import RecipeError
from muster.models.plan import ParallelPlan
from muster.parallel import context, fsdp, pipeline, tensor
from muster.parallel.blocks import checkpoint_activations, find_blocks, prepare_norms
from muster.parallel.compilation import compile_blocks
from muster.parallel.conflicts import refuse_conflicts, refuse_tensor_conflicts
from muster.parallel.ddp import replicate
from muster.parallel.default_plan import plan_of
from muster.parallel.engine import (
    Builder,
    Engine,
    MakeOptimizer,
    NamedParameters,
    TorchEngine,
)
from muster.parallel.float8 import Float8, convert
from muster.parallel.materialise import Fill, materialise
from muster.parallel.mesh import Mesh
from muster.parallel.stages import check_schedule, cut_evenly, stages_per_rank
from muster.recipe.own_task import parse
from muster.recipe.schema import Recipe

LINEAR = nn.functional.linear


def apply(
    builder: Builder,
    mesh: Mesh,
    recipe: Recipe,
    precision: str,
    make_optimizer: MakeOptimizer,
    fill: Fill = materialise,
    float8: Float8 = "none",
) -> Engine:
    """float8 → tensor → context → activation checkpointing → compile → shard → weights → replicate. `fill`
    gives a model that was built on the meta device its weights."""
    layout, options = mesh.layout, recipe.distributed
    nn.functional.linear = LINEAR  # ZeRO 3 replaces it for all models of the process
    refuse_conflicts(recipe, layout)
    if layout.zero:
        from muster.parallel import deepspeed

        return deepspeed.apply(builder, mesh, recipe, precision, make_optimizer)
    weights = builder.weights()
    parts, plan = _build(builder, mesh, recipe, on_meta=weights is not None)
    refuse_tensor_conflicts(recipe, layout, plan)
    sharded = layout.sharded
    stage = layout.pipeline > 1
    resting = torch.device("cpu") if sharded and options.fsdp.cpu_offload else mesh.device
    gathers_float8 = False
    layers: list[nn.Module] = []
    for part in parts:
        if weights is None:
            part.to(mesh.device)
        if float8 != "none":
            shards = layout.shards if sharded and resting == mesh.device else 1
            gathers_float8 = convert(part, plan, shards, emulate=float8 == "emulated")
        if layout.tensor > 1:
            assert mesh.axes is not None
            tensor.split(part, mesh.axes["tensor"], plan, options.tensor_options, stage=stage)
        if layout.context > 1:
            context.split(part, layout, mesh.rank, mesh.context)
        blocks = find_blocks(part, plan.blocks, "model.preset", stage=stage)
        layers += blocks
        checkpoint_activations(blocks, recipe.training.activation_checkpointing)
        if recipe.training.compile is True:
            compile_blocks(part, blocks, plan.compiled if layout.tensor == 1 else ())
        if sharded:
            fsdp.shard(part, mesh, plan, options.fsdp, precision)
        if weights is not None:
            fill(part, weights, mesh.device, resting)
    named = _named_parameters(parts, layers)
    _refuse_no_matrices(recipe, plan, named)
    optimizer = make_optimizer(named)
    split_loss = layout.tensor > 1 and options.tensor_options.loss_parallel
    if stage:
        return pipeline.PipelineEngine(
            parts,
            optimizer,
            mesh,
            plan,
            options.pipeline_options,
            split_loss=split_loss,
            sequence_parallel=tensor.shards_sequence(plan, options.tensor_options),
        )
    if layout.only_replicas and layout.world > 1:
        module, clock = replicate(parts[0], mesh, options.ddp)
        return TorchEngine(module, parts, optimizer, mesh, clock=clock)
    return TorchEngine(
        parts[0],
        parts,
        optimizer,
        mesh,
        split_loss=split_loss,
        reduce_each=options.fsdp.reduce_each_micro_batch,
        gathers_float8=gathers_float8,
    )


def model_name(recipe: Recipe) -> str:
    own = parse(recipe.task)
    return f"the model of {own.label}" if own else recipe.model.title


def _named_parameters(parts: list[nn.Module], blocks: list[nn.Module]) -> NamedParameters:
    """With the names of the matrices in blocks, none of which is an embedding or a head."""
    named = NamedParameters(pair for part in parts for pair in part.named_parameters())
    inside = {id(p) for block in blocks for p in block.parameters() if p.ndim == 2}
    named.hidden = frozenset(name for name, p in named if id(p) in inside)
    return named


def _refuse_no_matrices(recipe: Recipe, plan: ParallelPlan, named: NamedParameters) -> None:
    if recipe.training.optimizer == "muon" and not any(
        p.requires_grad for name, p in named if name in named.hidden
    ):
        raise RecipeError(
            "training.optimizer: muon updates the matrices of the model's blocks "
            f"({', '.join(plan.blocks)}), and none is trained there; use adamw"
        )


def _build(
    builder: Builder, mesh: Mesh, recipe: Recipe, on_meta: bool
) -> tuple[list[nn.Module], ParallelPlan]:
    """The model, or this rank's stages of it, and its parallel plan."""
    layout, options = mesh.layout, recipe.distributed.pipeline_options
    with torch.device("meta") if on_meta or layout.pipeline > 1 else nullcontext():
        model = builder.build_model()
        plan = plan_of(model, builder)
        each = stages_per_rank(options)
        layout.check_model(plan, model_name(recipe), each)
        if layout.pipeline == 1:
            prepare_norms(model, recipe)
            return [model], plan
        check_schedule(options, plan)
        find_blocks(model, recipe.distributed.fsdp.wrap or plan.blocks, "distributed.fsdp.wrap")
        cuts = cut_evenly(plan.costs, layout.pipeline * each)
        own = cuts[layout.pipeline_rank(mesh.rank) :: layout.pipeline]
        return [builder.build_part(start, stop) for start, stop in own], plan
