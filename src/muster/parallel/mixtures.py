"""Settings that are sound alone and not together, refused before anything is built."""

from __future__ import annotations

from muster.errors import RecipeError
from muster.parallel.layout import Layout
from muster.recipe.schema import Recipe


def refuse_mixtures(recipe: Recipe, layout: Layout) -> None:
    training, options = recipe.training, recipe.distributed
    cut = layout.tensor > 1
    if training.cuda_graphs and (layout.world > 1 or layout.zero):
        raise RecipeError(
            f"training.cuda_graphs: work is recorded on one GPU alone; this is {layout}. Set it to "
            "false, or train with --gpus 1"
        )
    if training.cuda_graphs and recipe.task not in ("speech-seq2seq", "causal-lm"):
        raise RecipeError(
            f"training.cuda_graphs: for speech-seq2seq and causal-lm; {recipe.task} waits for the GPU "
            "within a step, which cannot be recorded. Set it to false"
        )
    if training.cuda_graphs and training.activation_checkpointing != "none":
        raise RecipeError(
            "training.cuda_graphs: blocks computed twice cannot be recorded; set it to false, or "
            "training.activation_checkpointing to none"
        )
    if recipe.model.lora and (layout.zero or cut or layout.pipeline > 1):
        raise RecipeError(
            f"model.lora: adapters train under ddp, fsdp and hsdp; this is {layout}. "
            "Change distributed.strategy"
        )
    if cut and options.tensor_options.sequence_parallel:
        length = recipe.data.sequence_length
        if length % layout.tensor:
            raise RecipeError(
                f"data.sequence_length: {length} is not a multiple of the {layout.tensor} tensor ranks "
                f"that share each sequence; use {length - length % layout.tensor}, or set "
                "distributed.tensor_options.sequence_parallel=false"
            )
    elif cut and recipe.model.dropout:
        raise RecipeError(
            "model.dropout: tensor ranks that all hold the whole residual stream would each drop other "
            "parts of it; set distributed.tensor_options.sequence_parallel=true, or dropout to 0"
        )
    accumulates = training.gradient_accumulation_steps not in (1, "auto")  # solved by now
    if layout.plain and layout.world > 1 and options.ddp.static_graph and accumulates:
        raise RecipeError(
            "distributed.ddp.static_graph: true, but torch cannot combine it with gradient "
            "accumulation; set it to false, or training.gradient_accumulation_steps=1"
        )
    if options.fsdp.cpu_offload and (
        layout.zero or layout.shard * layout.replicate == 1 or layout.plain
    ):
        raise RecipeError(
            f"distributed.fsdp.cpu_offload: nothing is sharded by FSDP under {layout}; use strategy "
            "fsdp or hsdp, or set it to false"
        )
