"""DeepSpeed's JSON: generated from the recipe, or the user's file, checked against it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from muster.errors import RecipeError, UnreadableError
from muster.reading import json_file
from muster.reading.files import expanded
from muster.reading.text import in_one_line
from muster.reading.values import first_problem
from muster.recipe.distributed import DeepSpeed
from muster.recipe.schema import Recipe

NEVER = 10**9
ALIGNMENT_BYTES = 16  # of the widest read of a compiled kernel


def packing_order(numel: int) -> int:
    """Sorts the weights that stages 1 and 2 pack: none follows one that is less divisible, which would
    misalign it."""
    return -math.gcd(numel, ALIGNMENT_BYTES)


def config_for(recipe: Recipe, stage: int, world: int, precision: str) -> dict[str, Any]:
    """The configuration for deepspeed.initialize. A user's file may add to it, not contradict it."""
    generated = _generate(recipe, stage, world, precision)
    if recipe.distributed.deepspeed.config is None:
        return generated
    path = expanded(recipe.distributed.deepspeed.config)
    given = read(path)
    check(path, given, recipe, generated)
    return _merge(given, generated)


def read(path: Path) -> dict[str, Any]:
    try:
        given = json_file.read(path, numbers="finite")
    except OSError as error:
        raise RecipeError(f"distributed.deepspeed.config: {path}: {error.strerror}") from None
    except UnreadableError as error:
        raise RecipeError(f"distributed.deepspeed.config: {error}") from None
    if problem := first_problem(given):
        raise RecipeError(
            f"distributed.deepspeed.config: {path}: {in_one_line(problem.key)} {problem.words}"
        )
    return given


def _generate(recipe: Recipe, stage: int, world: int, precision: str) -> dict[str, Any]:
    training, options = recipe.training, recipe.distributed.deepspeed
    _check_offload(options, stage)
    if precision == "fp16":
        raise RecipeError(
            "training.precision: fp16 under zero would need DeepSpeed's own loss scaler; use bf16, "
            "or strategy ddp, fsdp or hsdp"
        )
    zero: dict[str, Any] = {"stage": stage, "contiguous_gradients": True}
    for key, device in (
        ("offload_optimizer", options.offload_optimizer),
        ("offload_param", options.offload_param),
    ):
        if device != "none":
            zero[key] = {"device": device} | (
                {"nvme_path": options.nvme_path} if device == "nvme" else {}
            )
    if stage == 3:  # partition small parameters too
        zero["stage3_param_persistence_threshold"] = 0
    if stage == 3 and training.activation_checkpointing == "selective":
        # DeepSpeed's own linear adds the bias in place, to the matrix product that is kept for the
        # recomputation, which then adds it again.
        zero["memory_efficient_linear"] = False
    accumulation = training.gradient_accumulation_steps
    return {
        "train_micro_batch_size_per_gpu": _micro_batch(recipe, world),
        "gradient_accumulation_steps": accumulation if isinstance(accumulation, int) else 1,
        "gradient_clipping": training.max_grad_norm or 0.0,
        "zero_optimization": zero,
        "bf16": {"enabled": precision == "bf16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": NEVER,
    }


def _micro_batch(recipe: Recipe, world: int) -> int:
    size, accumulation = (
        recipe.training.per_device_batch_size,
        recipe.training.gradient_accumulation_steps,
    )
    if isinstance(size, int):
        return size
    slots = world * (accumulation if isinstance(accumulation, int) else 1)
    return math.ceil(recipe.training.global_batch_size / slots)


def _check_offload(options: DeepSpeed, stage: int) -> None:
    if options.offload_param != "none" and stage < 3:
        raise RecipeError(
            f"distributed.deepspeed.offload_param: {options.offload_param} needs zero3, whose "
            f"parameters are in partitions; this is zero{stage}"
        )
    if options.offload_optimizer == "nvme" and stage < 3:
        raise RecipeError(
            f"distributed.deepspeed.offload_optimizer: nvme needs zero3, this is zero{stage}; use cpu"
        )
    if "nvme" in (options.offload_optimizer, options.offload_param) and not options.nvme_path:
        raise RecipeError("distributed.deepspeed.nvme_path: name a folder on the NVMe disk")


def check(path: Path, given: dict[str, Any], recipe: Recipe, generated: dict[str, Any]) -> None:
    """Refuse a file that contradicts the recipe; "auto" contradicts nothing."""
    training = recipe.training
    expected: dict[str, tuple[Any, str]] = {
        "train_batch_size": (training.global_batch_size, "training.global_batch_size"),
        "train_micro_batch_size_per_gpu": (
            generated["train_micro_batch_size_per_gpu"],
            "training.per_device_batch_size",
        ),
        "gradient_accumulation_steps": (
            generated["gradient_accumulation_steps"],
            "training.gradient_accumulation_steps",
        ),
        "gradient_clipping": (generated["gradient_clipping"], "training.max_grad_norm"),
        "zero_optimization.stage": (
            generated["zero_optimization"]["stage"],
            "distributed.strategy",
        ),
        "bf16.enabled": (generated["bf16"]["enabled"], "training.precision"),
        "fp16.enabled": (False, "training.precision"),
        # without these checks DeepSpeed applies gradients that are not finite
        "bf16.check_grad_overflow": (True, "training.max_bad_steps"),
        "zero_optimization.compute_grad_norm": (True, "training.max_bad_steps"),
        "zero_optimization.memory_efficient_linear": (
            generated["zero_optimization"].get("memory_efficient_linear", "auto"),
            "training.activation_checkpointing",
        ),
        "optimizer.params.lr": (training.lr, "training.lr"),
        "optimizer.params.betas": (list(training.betas), "training.betas"),
        "optimizer.params.eps": (training.eps, "training.eps"),
        "optimizer.params.weight_decay": (training.weight_decay, "training.weight_decay"),
        "zero_optimization.offload_optimizer.device": (
            recipe.distributed.deepspeed.offload_optimizer,
            "distributed.deepspeed.offload_optimizer",
        ),
        "zero_optimization.offload_param.device": (
            recipe.distributed.deepspeed.offload_param,
            "distributed.deepspeed.offload_param",
        ),
    }
    settings = dict(_flat(given))
    wrong = [
        f"{key} is {in_one_line(repr(settings[key]))} there and {value!r} in the recipe ({name})"
        for key, (value, name) in expected.items()
        if key in settings and settings[key] not in ("auto", value)
    ]
    kind = settings.get("optimizer.type", training.optimizer)
    known = ("adamw", "adam") if training.optimizer == "adamw" else (training.optimizer,)
    if str(kind).lower() not in known:
        wrong.append(
            f"optimizer.type is {in_one_line(repr(kind))} there and {training.optimizer} in the recipe (training.optimizer)"
        )
    if any(key.startswith("scheduler.") for key in settings):
        wrong.append("it has a scheduler, and the schedule is the recipe's (training.schedule)")
    if wrong:
        raise RecipeError(f"{path} contradicts the recipe: {'; '.join(wrong)}")


def _flat(document: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _merge(given: dict[str, Any], generated: dict[str, Any]) -> dict[str, Any]:
    """The user's keys beside muster's own. Optimizer and scheduler are muster's, and DeepSpeed
    derives the batch size."""
    kept = {
        key: value
        for key, value in given.items()
        if key not in ("optimizer", "scheduler", "train_batch_size")
        and (isinstance(value, dict) or key not in generated)
    }
    return _overlay(generated, kept)


def _overlay(settings: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """`given` merged over `settings` recursively, except "auto" values."""
    both = dict(settings)
    for key, value in given.items():
        if isinstance(value, dict):
            own = both.get(key, {})
            both[key] = _overlay(own if isinstance(own, dict) else {}, value)
        elif value != "auto":
            both[key] = value
    return both
