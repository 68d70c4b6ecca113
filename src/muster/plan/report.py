"""A plan in words: the guide's decision tree, the settings, the arithmetic."""

from __future__ import annotations

import math
from typing import Any

from muster.hardware.catalogue import Accelerator
from muster.parallel.layout import Layout
from muster.plan.memory import GIB, MARGIN, Choice
from muster.plan.search import Found
from muster.plan.time import Cluster
from muster.plan.weigh import Plan, Planner, describe

MOST = 4096  # devices that are tried when it is asked how many would do


def settings(plan: Plan) -> list[str]:
    """What makes `muster train` do as planned."""
    choice, layout = plan.choice, plan.choice.layout
    found = []
    if layout.world > 1 or layout.zero:
        found.append(f"distributed.strategy={plan.strategy}")
    sizes = {
        "hsdp": ("replicate", "shard"),
        "tensor": ("tensor",),
        "pipeline": ("pipeline",),
        "hybrid": ("replicate", "shard", "tensor", "pipeline"),
    }
    found += [f"distributed.{a}={layout.sizes[a]}" for a in sizes.get(plan.strategy, ())]
    found += [
        f"training.per_device_batch_size={_per_device(plan)}",
        f"training.gradient_accumulation_steps={choice.accumulation}",
    ]
    if layout.pipeline > 1:
        found.append(f"distributed.pipeline_options.microbatches={choice.pieces}")
    if choice.checkpointing != "none":
        found.append(f"training.activation_checkpointing={choice.checkpointing}")
    if choice.reduce_each and choice.accumulation > 1:
        found.append("distributed.fsdp.reduce_each_micro_batch=true")
    if choice.offload != "none":
        found += _offload(layout, choice)
    return found


def _offload(layout: Layout, choice: Choice) -> list[str]:
    if not layout.zero:
        return ["distributed.fsdp.cpu_offload=true"]
    keys = ["optimizer"] if choice.offload == "optimizer" else ["optimizer", "param"]
    return [f"distributed.deepspeed.offload_{key}=cpu" for key in keys]


def _per_device(plan: Plan) -> int:
    """Samples that a data rank holds at a time, as the recipe counts them."""
    slots = plan.choice.layout.data_ranks * plan.choice.accumulation
    return math.ceil(plan.samples / slots)


def tree(planner: Planner, found: Found) -> list[str]:
    """How one gets to the answer, question by question."""
    device, capacity = planner.cluster.device, planner.capacity / GIB
    alone = planner.weigh(_alone(planner))
    lines = [
        f"Does one copy fit on one {device.title}? {_yes(planner.fits(alone))} It needs "
        f"{alone.need.total / GIB:.1f} of {capacity:.1f} GiB, {describe(alone.choice)}."
    ]
    best = found.best
    if planner.fits(alone):
        lines += _copies(planner, found)
    else:
        lines.append(
            f"Is it a transformer whose blocks repeat? {_yes(bool(planner.subject.plan.tensor))} "
            + (
                "Then it can be sharded (FSDP, ZeRO), split (tensor) or staged (pipeline)."
                if planner.subject.plan.tensor
                else "Then it is sharded: its layers are not cut."
            )
        )
    if best is None:
        lines.append("Nothing fits.")
        return lines
    rivals = [plan for plan in found.plans if plan.strategy != best.strategy]
    fastest = min(rivals, key=lambda plan: plan.duration.total, default=None)
    lines.append(
        f"Chosen: {best.choice.layout}, {describe(best.choice)}: {best.need.total / GIB:.1f} GiB and "
        f"{best.duration.total:.3g} s a step."
    )
    if fastest is not None:
        change = fastest.duration.total / best.duration.total - 1
        lines.append(
            f"Next: {fastest.choice.layout}, {describe(fastest.choice)}: "
            + (
                f"{100 * change:.0f} % slower."
                if change > 0.005
                else f"as fast ({-100 * change:.0f} % faster), but less simple."
            )
        )
    return lines


def _copies(planner: Planner, found: Found) -> list[str]:
    if planner.cluster.world == 1:
        return []
    said = "So each rank can have a copy: DDP, the simplest"
    ddp = min(
        (plan for plan in found.plans if plan.strategy == "ddp"),
        key=lambda plan: plan.duration.total,
        default=None,
    )
    if found.best is None or found.best.strategy == "ddp" or ddp is None:
        return [f"{said}."]
    slower = 100 * (ddp.duration.total / found.best.duration.total - 1)
    return [f"{said}, would do, {slower:.0f} % slower than what follows: {describe(ddp.choice)}."]


def _yes(answer: bool) -> str:
    return "Yes." if answer else "No."


def _alone(planner: Planner) -> Choice:
    training = planner.subject.recipe.training
    return Choice(
        Layout(),
        planner.precision,
        rows=1,
        accumulation=2,  # gradients stay while the next micro-batch is computed
        checkpointing=training.activation_checkpointing,
        compiled=training.compile,
    )


def cures(planner: Planner, found: Found) -> list[str]:
    """What would make it fit, where nothing does: first by how much it misses."""
    recipe, least = planner.subject.recipe, found.closest
    if least is not None:
        words = [f"the smallest way found, {least.choice.layout}, {planner.too_much(least)}"]
    else:
        words = [f"{name}: {reason}" for name, reason in found.rejected.items()]
    if recipe.distributed.strategy != "auto":
        words.append("distributed.strategy=auto, which weighs the others")
    if (gpus := _enough(planner)) is not None:
        words.append(f"more GPUs: it fits on {gpus}, in shards with full checkpointing")
    if least is not None and recipe.training.activation_checkpointing == "selective":
        words.append("training.activation_checkpointing=full")
    if least is not None and recipe.task == "causal-lm":
        words.append(f"a data.sequence_length shorter than {recipe.data.sequence_length}")
    if recipe.model.lora is None:
        words.append("model.lora, which trains few weights")
    return [*words, "a GPU with more memory, or a smaller model"]


def _enough(planner: Planner) -> int | None:
    """The fewest devices, of ever twice as many, on which shards fit one sample at a time."""
    total = planner.subject.recipe.training.global_batch_size
    world = planner.cluster.world
    while (world := world * 2) <= min(MOST, total):
        choice = Choice(
            Layout(shard=world),
            planner.precision,
            rows=1,
            accumulation=math.ceil(total / world),
            checkpointing="full",
            reduce_each=True,
        )
        cluster = Cluster(planner.cluster.device, world, planner.cluster.per_node)
        if planner.fits(planner.on(cluster).weigh(choice)):
            return world
    return None


def arithmetic(planner: Planner, plan: Plan) -> list[str]:
    """The sums behind a plan's figures."""
    choice, subject = plan.choice, planner.subject
    stage = max(
        zip(plan.needs, planner.stages(choice.layout), strict=True), key=lambda p: p[0].total
    )[1]
    parts, low = plan.need.parts, choice.low
    layout = choice.layout
    shards = layout.world if layout.zero else layout.shard
    lines = [
        f"{subject.parameters:,} parameters, {subject.trained:,} of them trained; the fullest rank's "
        f"stage has {stage.numel:,}, in {shards} shard(s)",
        f"weights {parts['weights'] / GIB:.2f} GiB, gradients {parts['gradients'] / GIB:.2f}, AdamW's "
        f"averages {parts['optimizer'] / GIB:.2f} at the step's highest point; 4 + 4 + 8 bytes a "
        "parameter, in shards; gradients are whole while micro-batches accumulate under FSDP"
        + (f"; ZeRO computes with {low} bytes and keeps a float32 copy" if layout.zero else ""),
        f"activations {parts['activations'] / GIB:.2f} GiB: recorded from the model itself on fake "
        f"tensors, {choice.rows} sample(s) at a time"
        + (f", up to {layout.pipeline} micro-batches in flight" if layout.pipeline > 1 else ""),
        f"buffers {parts['buffers'] / GIB:.2f} GiB: gathered blocks, messages on their way, cuBLAS",
        f"slack {parts['slack'] / GIB:.2f} GiB and context {parts['context'] / GIB:.2f}: outside of what "
        "torch allocates",
        f"fits if the sum, {plan.need.total / GIB:.2f} GiB, is at most {100 * (1 - MARGIN):.0f} % of "
        f"{planner.capacity / GIB:.1f}",
        f"global batch {plan.samples} = {_per_device(plan)} per data rank × accumulation "
        f"{choice.accumulation} × {layout.data_ranks} data ranks",
    ]
    lines += [
        f"{name.replace('_', ' ')} {seconds:.4g} s"
        for name, seconds in vars(plan.duration).items()
        if seconds > 0
    ]
    return [*lines, f"a step {plan.duration.total:.4g} s, {plan.samples_per_s:.4g} samples/s"]


def as_dict(planner: Planner, found: Found, name: str) -> dict[str, Any]:
    """For other programs."""
    return {
        "recipe": name,
        "parameters": planner.subject.parameters,
        "trained": planner.subject.trained,
        "device": planner.cluster.device.title,
        "device_gib": planner.capacity / GIB,
        "gpus": planner.cluster.world,
        "global_batch_size": planner.subject.recipe.training.global_batch_size,
        "per_node": planner.cluster.per_node,
        "precision": planner.precision,
        "answer": plan_dict(found.best) if found.best else None,
        "why": tree(planner, found),
        "others": [plan_dict(plan) for plan in distinct(found.plans)[1:]],
        "rejected": found.rejected,
    }


def plan_dict(plan: Plan) -> dict[str, Any]:
    choice = plan.choice
    return {
        "strategy": plan.strategy,
        "layout": choice.layout.sizes | {"zero": choice.layout.zero},
        "micro_batch": choice.rows,
        "pieces": choice.pieces,
        "accumulation": choice.accumulation,
        "checkpointing": choice.checkpointing,
        "offload": choice.offload,
        "memory_gib": {part: size / GIB for part, size in plan.need.parts.items()},
        "total_gib": plan.need.total / GIB,
        "allocated_gib": plan.need.allocated / GIB,
        "host_gib": plan.need.host / GIB,
        "step_s": vars(plan.duration) | {"total": plan.duration.total},
        "samples_per_s": plan.samples_per_s,
        "settings": settings(plan),
    }


def distinct(plans: list[Plan]) -> list[Plan]:
    """The best of each layout."""
    seen: dict[str, Plan] = {}
    for plan in plans:
        seen.setdefault(str(plan.choice.layout), plan)
    return list(seen.values())


def device_words(device: Accelerator) -> str:
    own = " (measured)" if device.measured else ""
    return f"{device.title}, {device.memory_gib:.1f} GiB{own}"
