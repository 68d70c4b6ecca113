"""A plan as text: decision tree, settings, arithmetic."""

from __future__ import annotations

import math
from typing import Any

from muster.hardware.catalogue import Accelerator
from muster.parallel.layout import Layout
from muster.planner.memory import GIB, MARGIN, Choice, static_memory
from muster.planner.optimizer import OptimizerChoice
from muster.planner.planner import Plan, Planner, choice_summary
from muster.planner.search import SearchResult
from muster.planner.time import Cluster

MAX_DEVICES = 4096  # tried when looking for how many are needed


def settings(plan: Plan) -> list[str]:
    """Overrides that make `muster train` follow the plan."""
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
    if layout.context > 1:
        found.append(f"distributed.context={layout.context}")
    found += [
        f"training.per_device_batch_size={_per_device(plan)}",
        f"training.gradient_accumulation_steps={choice.accumulation}",
    ]
    if layout.pipeline > 1:
        found.append(f"distributed.pipeline_options.microbatches={choice.microbatches}")
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
    """training.per_device_batch_size."""
    slots = plan.choice.layout.data_ranks * plan.choice.accumulation
    return math.ceil(plan.samples / slots)


def decision_tree(planner: Planner, found: SearchResult) -> list[str]:
    """How the plan was chosen, question by question."""
    device = planner.cluster.device
    fits, needs = _fits_one_device(planner)
    lines = [f"Does one copy fit on one {device.title}? {_yes(fits)} It needs {needs}."]
    if planner.subject.recipe.training.precision == "fp8":
        lines.append("Planned as bf16: time and memory of float8 products are not known here.")
    best = found.best
    if fits:
        lines += _copies(planner, found)
    else:
        lines.append(
            f"Is it a transformer whose blocks repeat? {_yes(bool(planner.subject.plan.tensor))} "
            + (
                "Then FSDP, ZeRO, tensor and pipeline parallelism apply."
                if planner.subject.plan.tensor
                else "Then FSDP and ZeRO apply: its layers are not split."
            )
        )
    lines += _faster_precision(planner)
    if best is None:
        lines.append("Nothing fits.")
        return lines
    rivals = [plan for plan in found.plans if plan.strategy != best.strategy]
    fastest = min(rivals, key=lambda plan: plan.duration.total, default=None)
    lines.append(
        f"Chosen: {best.choice.layout}, {choice_summary(best.choice)}: {best.memory.total / GIB:.1f} GiB and "
        f"{best.duration.total:.3g} s a step."
    )
    if fastest is not None:
        change = fastest.duration.total / best.duration.total - 1
        lines.append(
            f"Next: {fastest.choice.layout}, {choice_summary(fastest.choice)}: "
            + compared(100 * change)
        )
    return lines


def _faster_precision(planner: Planner) -> list[str]:
    """`auto` takes fp32 where there is no bf16, since fp16 needs a loss scale."""
    device, peaks = planner.cluster.device, planner.cluster.device.matrix_tflops
    asked = planner.subject.recipe.training.precision
    if asked != "auto" or "bf16" in peaks or peaks.get("fp16", 0.0) <= peaks["fp32"]:
        return []
    return [
        f"{device.title} has no bf16, so this is fp32; training.precision=fp16, with a loss scale, is faster "
        f"there: {peaks['fp16']:.0f} TFLOP/s at best instead of {peaks['fp32']:.0f}."
    ]


def compared(percent: float) -> str:
    """A step of a plan that was not chosen, beside the chosen one's."""
    if percent >= 0.5:
        return f"{percent:.0f} % slower."
    if percent > -0.5:
        return "as fast, but less simple."
    return f"{-percent:.0f} % faster by the estimate, but less simple."


def _copies(planner: Planner, found: SearchResult) -> list[str]:
    if planner.cluster.world == 1:
        return []
    answer = "So each rank can have a copy: DDP, the simplest"
    ddp = min(
        (plan for plan in found.plans if plan.strategy == "ddp"),
        key=lambda plan: plan.duration.total,
        default=None,
    )
    if found.best is None or found.best.strategy == "ddp" or ddp is None:
        return [f"{answer}."]
    slower = 100 * (ddp.duration.total / found.best.duration.total - 1)
    return [
        f"{answer}, would fit, {slower:.0f} % slower than the plan below: {choice_summary(ddp.choice)}."
    ]


def _yes(answer: bool) -> str:
    return "Yes." if answer else "No."


def _fits_one_device(planner: Planner) -> tuple[bool, str]:
    """And what it needs there; without a recording where the weights alone do not fit."""
    training, capacity = planner.subject.recipe.training, planner.capacity / GIB
    choice = Choice(
        Layout(),
        planner.precision,
        rows=1,
        accumulation=2,  # gradients are kept during the next micro-batch
        checkpointing=training.activation_checkpointing,
        compiled=training.compile is True,
        optimizer=OptimizerChoice.of(training),
    )
    (stage,) = planner.stages(choice.layout)
    least = sum(static_memory(choice, stage).values()) / GIB
    if least > capacity:
        alone = "for weights, gradients and the optimizer alone"
        return False, f"{least:.1f} of {capacity:.1f} GiB {alone}"
    plan = planner.evaluate(choice)
    total = plan.memory.total / GIB
    return planner.fits(plan), f"{total:.1f} of {capacity:.1f} GiB, one sample at a time"


def remedies(planner: Planner, found: SearchResult) -> list[str]:
    """What would make it fit, where nothing does; first the shortfall."""
    recipe, least = planner.subject.recipe, found.closest
    if least is not None:
        words = [f"the plan that needs least, {least.choice.layout}, {planner.shortfall(least)}"]
    else:
        words = [f"{name}: {reason}" for name, reason in found.rejected.items()]
    if recipe.distributed.strategy != "auto":
        words.append("distributed.strategy=auto, which tries the others")
    if (gpus := _devices_needed(planner)) is not None:
        words.append(f"more GPUs: it fits on {gpus} with fsdp and full activation checkpointing")
    if least is not None and recipe.training.activation_checkpointing == "selective":
        words.append("training.activation_checkpointing=full")
    if least is not None and planner.subject.task.facts.packed:
        words.append(f"a data.sequence_length shorter than {recipe.data.sequence_length}")
    if recipe.model.lora is None:
        words.append("model.lora, which trains few weights")
    return [*words, "a GPU with more memory, or a smaller model"]


def _devices_needed(planner: Planner) -> int | None:
    """The fewest devices, doubling their number, on which FSDP fits with one sample per micro-batch."""
    recipe = planner.subject.recipe
    total, asked = recipe.training.global_batch_size, recipe.distributed.context
    world, context = planner.cluster.world, asked if isinstance(asked, int) else 1
    while (world := world * 2) <= min(MAX_DEVICES, total * context):
        layout = Layout(shard=world // context, context=context)
        choice = Choice(
            layout,
            planner.precision,
            rows=1,
            accumulation=math.ceil(total / layout.data_ranks),
            checkpointing="full",
            reduce_each=True,
            optimizer=OptimizerChoice.of(planner.subject.recipe.training),
        )
        cluster = Cluster(planner.cluster.device, world, planner.cluster.per_node)
        if planner.fits(planner.on(cluster).evaluate(choice)):
            return world
    return None


def _state_each(choice: Choice) -> str:
    """Bytes per parameter of an optimizer's state, in words where they differ."""
    kept = choice.optimizer
    exact = kept.name in ("adamw", "sgd")
    return str(kept.least_bytes) if exact else f"{kept.least_bytes} or more ({kept.name})"


def arithmetic(planner: Planner, plan: Plan) -> list[str]:
    """The calculation of a plan's figures."""
    choice, subject = plan.choice, planner.subject
    stage = max(
        zip(plan.estimates, planner.stages(choice.layout), strict=True), key=lambda p: p[0].total
    )[1]
    parts, low = plan.memory.parts, choice.low
    layout = choice.layout
    shards = layout.shards
    lines = [
        f"{subject.parameters:,} parameters, {subject.trained:,} of them trained; the largest "
        f"stage has {stage.numel:,}, in {shards} shard(s)",
        f"weights {parts['weights'] / GIB:.2f} GiB, gradients {parts['gradients'] / GIB:.2f}, the optimizer's "
        f"state {parts['optimizer'] / GIB:.2f} at the step's peak; 4 + 4 + {_state_each(choice)} bytes per "
        "parameter, sharded; FSDP keeps gradients unsharded while micro-batches accumulate"
        + (
            f"; ZeRO computes in {low} bytes and keeps float32 master weights"
            if layout.zero
            else ""
        ),
        f"activations {parts['activations'] / GIB:.2f} GiB: recorded with the model on fake "
        f"tensors, {choice.rows} sample(s) at a time"
        + (f", up to {layout.pipeline} micro-batches in flight" if layout.pipeline > 1 else ""),
        f"buffers {parts['buffers'] / GIB:.2f} GiB: gathered blocks, communication buffers, cuBLAS",
        f"slack {parts['slack'] / GIB:.2f} GiB and context {parts['context'] / GIB:.2f}: not allocated "
        "by torch",
        f"fits if the sum, {plan.memory.total / GIB:.2f} GiB, is at most {100 * (1 - MARGIN):.0f} % of "
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


def as_dict(planner: Planner, found: SearchResult, name: str) -> dict[str, Any]:
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
        "why": decision_tree(planner, found),
        "others": [plan_dict(plan) for plan in distinct(found.plans)[1:]],
        "rejected": found.rejected,
    }


def plan_dict(plan: Plan) -> dict[str, Any]:
    choice = plan.choice
    return {
        "strategy": plan.strategy,
        "layout": choice.layout.sizes | {"zero": choice.layout.zero, "ddp": choice.layout.ddp},
        "micro_batch": choice.rows,
        "pieces": choice.microbatches,
        "accumulation": choice.accumulation,
        "checkpointing": choice.checkpointing,
        "offload": choice.offload,
        "memory_gib": {part: size / GIB for part, size in plan.memory.parts.items()},
        "total_gib": plan.memory.total / GIB,
        "allocated_gib": plan.memory.allocated / GIB,
        "host_gib": plan.memory.host / GIB,
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


def describe_device(device: Accelerator) -> str:
    own = " (measured)" if device.measured else ""
    return f"{device.title}, {device.memory_gib:.1f} GiB{own}"
