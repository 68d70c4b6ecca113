"""torch.compile: what is compiled, and when `training.compile: auto` does so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from muster.auto import AutoChoice
from muster.errors import RecipeError
from muster.recipe.schema import Recipe
from muster.workloads import WORKLOADS, workload

MIN_STEPS = 200  # optimizer steps that win back the seconds which a first compilation takes


class CompilationError(RecipeError):
    """What is compiled cannot run in this layout."""


def choose(
    recipe: Recipe, samples: int | None, *, on_gpu: bool, compiles: bool | None = None
) -> AutoChoice:
    """Whether the model is compiled. `samples`: in an epoch, None if not known. `compiles`: whether it
    pays in the task's model; by its name."""
    if compiles is None:
        compiles = workload(recipe.task).compiles
    asked, steps = recipe.training.compile, _steps(recipe, samples)
    if asked != "auto":
        return AutoChoice.forced(asked)
    if not on_gpu:
        reason = "it gains little on a CPU"
    elif not compiles and recipe.task not in WORKLOADS:
        reason = "the task does not say that it pays (compiles = True)"
    elif not compiles:
        reason = f"it gains little in a model of {recipe.task}"
    elif recipe.distributed.pipeline_options.schedule == "zero-bubble":
        reason = "the zero-bubble schedule splits the backward pass of each block"
    elif recipe.training.precision == "fp8":
        return AutoChoice(True, "float8 products pay only in compiled blocks")
    elif steps is not None and steps < MIN_STEPS:
        reason = f"a run of {steps} steps is over before it pays; it takes {MIN_STEPS}"
    else:
        return AutoChoice(True, "it pays in a run of this length")
    return AutoChoice(False, reason)


def with_compile(recipe: Recipe, compiled: bool) -> Recipe:
    training = recipe.training.model_copy(update={"compile": compiled})
    return recipe.model_copy(update={"training": training})


def _steps(recipe: Recipe, samples: int | None) -> int | None:
    training = recipe.training
    if training.steps is not None or samples is None:
        return training.steps
    return (training.epochs or 1) * (samples // training.global_batch_size)


def compile_blocks(
    model: nn.Module, blocks: Sequence[nn.Module], others: Sequence[str]
) -> list[nn.Module]:
    """The modules that were compiled. Blocks of one class share a compiled graph."""
    torch.compiler.set_stance("default")
    compiled = [*blocks, *(m for name, m in model.named_modules() if name in others)]
    for module in compiled:
        module.forward = torch.compile(module.forward)  # type: ignore[method-assign]
    return compiled


def is_compiler_error(error: BaseException | None) -> bool:
    """Of Dynamo, Inductor or Triton; also as the cause of another error."""
    if error is None:
        return False
    homes = ("torch._dynamo.", "torch._inductor.", "triton.")
    return type(error).__module__.startswith(homes) or is_compiler_error(error.__cause__)


def tell_compilation(begins: Callable[[], None], ends: Callable[[], None]) -> None:
    """Call these in this process from now on whenever something is compiled, such as for a new shape in
    the middle of a run."""
    from muster.torch_internals import callback_handler  # which takes a second

    callback_handler.register_start_callback(lambda _: begins())
    callback_handler.register_end_callback(lambda _: ends())


def run_uncompiled() -> None:
    """Whatever is compiled in this process runs as it is written from now on."""
    torch.compiler.set_stance("force_eager")


def compiler_error(device: torch.device) -> str | None:
    """Why nothing can be compiled here, such as a missing C compiler."""
    try:
        torch.compile(torch.sin)(torch.ones(64, device=device))
    except Exception as error:
        return summary(error)
    return None


def summary(error: Exception) -> str:
    """Its class and first two lines: the first of a compiler's error may only say which compiler."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"
