"""Settings that are valid alone but not together, refused before anything is built."""

from __future__ import annotations

from muster.errors import RecipeError
from muster.models.plan import ParallelPlan
from muster.parallel.adapters import refuse_adapters
from muster.parallel.float8 import MULTIPLE
from muster.parallel.layout import Layout
from muster.parallel.optimizers.facts import refuse_optimizer
from muster.recipe.schema import Recipe
from muster.workloads import WORKLOADS, workload


def refuse_conflicts(recipe: Recipe, layout: Layout) -> None:
    training, options = recipe.training, recipe.distributed
    layout.check_sequences(recipe)
    own = recipe.task not in WORKLOADS  # which only tries can tell, where the recipe asks for it
    if training.cuda_graphs is True and (problem := no_graphs(recipe, layout, own or None)):
        raise RecipeError(f"training.cuda_graphs: {problem}; set it to false")
    refuse_adapters(recipe, layout)
    if training.ctc_weight and (layout.tensor > 1 or layout.pipeline > 1):
        raise RecipeError(
            "training.ctc_weight: the CTC head trains where a rank has the whole model or shards of it by FSDP "
            f"or ZeRO; this is {layout}. Set it to 0, or change distributed.strategy"
        )
    if training.precision == "fp8":
        _refuse_float8(recipe, layout)
    refuse_optimizer(recipe, layout)
    if recipe.model.freeze_encoder and layout.pipeline > 1:
        raise RecipeError(
            "model.freeze_encoder: a pipeline stage in the encoder would have nothing to train; set it "
            "to false, or use distributed.strategy ddp, fsdp or tensor"
        )
    accumulates = training.gradient_accumulation_steps not in (1, "auto")  # already resolved
    if layout.only_replicas and layout.world > 1 and options.ddp.static_graph and accumulates:
        raise RecipeError(
            "distributed.ddp.static_graph: true, but torch cannot combine it with gradient "
            "accumulation; set it to false, or training.gradient_accumulation_steps=1"
        )
    if options.fsdp.cpu_offload and (
        layout.zero or layout.shards * layout.replicate == 1 or layout.only_replicas
    ):
        raise RecipeError(
            f"distributed.fsdp.cpu_offload: nothing is sharded by FSDP under {layout}; use strategy "
            "fsdp or hsdp, or set it to false"
        )


def _refuse_float8(recipe: Recipe, layout: Layout) -> None:
    if layout.zero or layout.tensor > 1 or layout.pipeline > 1:
        raise RecipeError(
            f"training.precision: fp8 trains on one GPU, and under ddp, fsdp and hsdp; this is {layout}. "
            "Change distributed.strategy, or use bf16"
        )
    length, multiple = recipe.data.sequence_length, MULTIPLE * layout.context
    if workload(recipe.task).packed and length % multiple:
        raise RecipeError(
            f"data.sequence_length: float8 products need a multiple of {multiple}, and {length} is none; use "
            f"{max(multiple, length - length % multiple)}, or training.precision=bf16"
        )


def no_graphs(recipe: Recipe, layout: Layout, captures: bool | None = None) -> str | None:
    """Why CUDA graphs cannot be captured, or None. `captures`: whether the task can; by its name."""
    if layout.zero or not layout.only_replicas or layout.context > 1:
        return f"graphs are captured on one GPU or under DDP, and this is {layout}"
    if captures is None:
        captures = workload(recipe.task).captures
    if not captures and recipe.task not in WORKLOADS:
        return "the task does not say that its steps can be captured (captures = True)"
    if not captures:
        return f"{recipe.task} synchronizes with the GPU within a step, which cannot be captured"
    if recipe.training.activation_checkpointing != "none":
        return "activation checkpointing cannot be captured"
    return None


def refuse_tensor_conflicts(recipe: Recipe, layout: Layout, plan: ParallelPlan) -> None:
    """Those that depend on how the model's matrices are split."""
    if layout.tensor == 1:
        return
    training, options = recipe.training, recipe.distributed
    if plan.shards_sequence and options.tensor_options.sequence_parallel:
        length = (
            recipe.data.sequence_length
        )  # of which context ranks have equal parts, checked before
        if length % layout.tensor:
            raise RecipeError(
                f"data.sequence_length: {length} is not a multiple of the {layout.tensor} tensor ranks "
                f"that share each sequence; use {length - length % layout.tensor}, or set "
                "distributed.tensor_options.sequence_parallel=false"
            )
    elif recipe.model.dropout:
        cure = "set distributed.tensor_options.sequence_parallel=true, or dropout to 0"
        raise RecipeError(
            "model.dropout: tensor ranks with replicated activations would draw different dropout "
            f"masks; {cure if plan.shards_sequence else 'set it to 0'}"
        )
    if training.label_smoothing and options.tensor_options.loss_parallel:
        raise RecipeError(
            "training.label_smoothing: torch has none for logits that are sharded along the "
            "vocabulary; set distributed.tensor_options.loss_parallel=false, or label_smoothing to 0"
        )
