"""`training.precision: fp8`: bfloat16, with float8 products in the large linear layers, by torchao.

Weights keep their names and their float32 values. Each product rounds its two factors to float8, each with
one scale, found from its largest value. Under FSDP weights are rounded before they are gathered, which halves
the traffic once more.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn

from muster.errors import RecipeError
from muster.hardware.catalogue import FLOAT8_CAPABILITY
from muster.models.plan import ParallelPlan

log = logging.getLogger(__name__)

Float8 = Literal["none", "device", "emulated"]  # products of a model's linear layers in float8

MULTIPLE = 16  # of both sides of a matrix, and of the rows of its input
SMALLEST = 1536  # side of a matrix whose products gain more than rounding its factors takes
BASE = ".base_layer"  # what peft appends to the name of a layer with adapters


def refuse_device(device: torch.device) -> None:
    """Where there are no float8 products, or no torchao."""
    if device.type == "cpu" or torch.version.hip:
        kind = "a CPU" if device.type == "cpu" else "an AMD GPU"
        raise RecipeError(
            f"training.precision: fp8 needs an NVIDIA GPU, and this is {kind}; use bf16"
        )
    if (capability := torch.cuda.get_device_capability(device)) < FLOAT8_CAPABILITY:
        raise RecipeError(
            f"training.precision: {torch.cuda.get_device_name(device)} has no float8 products: its compute "
            f"capability is {capability[0]}.{capability[1]}, and fp8 needs 8.9 (Ada, Hopper or newer); use bf16"
        )
    if find_spec("torchao") is None:
        raise RecipeError(
            "training.precision: fp8 needs torchao: pip install 'muster-train[fp8]'; or use bf16"
        )


def choose(
    model: nn.Module, plan: ParallelPlan, shards: int, *, any_size: bool = False
) -> tuple[list[str], bool]:
    """Names of the layers to convert: those that the plan names, if float8 pays at their size; and whether
    FSDP gathers their weights as float8. `shards`: of the weights that FSDP gathers on the device; float8
    weights cannot be gathered from shards of unequal size."""
    if not plan.float8:
        raise RecipeError(
            f"training.precision: fp8 is for causal-lm: which layers of a {type(model).__name__} could be "
            "float8 is not known; use bf16"
        )
    shapes: dict[str, tuple[int, int]] = {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and _named(name.removesuffix(BASE), plan.float8)
    }
    smallest = MULTIPLE if any_size else SMALLEST
    shapes = {
        name: sides
        for name, sides in shapes.items()
        if min(sides) >= smallest and not any(side % MULTIPLE for side in sides)
    }
    if not shapes:
        raise RecipeError(
            "training.precision: fp8 would convert no layer of this model: float8 products pay in matrices "
            f"of {SMALLEST} rows and columns or more, multiples of {MULTIPLE}, and it has none; use bf16"
        )
    return list(shapes), shards > 1 and not any(rows % shards for rows, _ in shapes.values())


def _named(name: str, patterns: Sequence[str]) -> bool:
    parts = name.split(".")
    return any(_matches(parts, pattern.split(".")) for pattern in patterns)


def _matches(parts: list[str], pattern: list[str]) -> bool:
    return len(parts) == len(pattern) and all(
        wanted in ("*", part) for part, wanted in zip(parts, pattern, strict=True)
    )


def convert(model: nn.Module, plan: ParallelPlan, shards: int, *, emulate: bool) -> bool:
    """In place, before compilation and sharding; see `choose`. Returns whether FSDP gathers float8.
    `emulate`: on any device and in layers of any size, by float32 products of rounded values."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    names, gathers = choose(model, plan, shards, any_size=emulate)
    config = Float8LinearConfig(
        enable_fsdp_float8_all_gather=gathers,
        round_scales_to_power_of_2=True,
        emulate=emulate,
    )
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names, config=config)
    log.info("float8 products in %d layers", len(names))
    return gathers


def update_scales(parts: Sequence[nn.Module]) -> None:
    """Of all weights that FSDP gathers in float8, in one all-reduce, after they have changed. Without it,
    every gathering would begin with an all-reduce of its own. Powers of two, as without FSDP."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    for part in parts:
        precompute_float8_dynamic_scale_for_fsdp(part)
        found: list[Any] = [getattr(p, "_local_tensor", None) for p in part.parameters()]
        scales = [p._precomputed_scale for p in found if hasattr(p, "_precomputed_scale")]
        if scales:
            rounded = torch.stack(scales).log2().floor().exp2()
            torch._foreach_copy_(scales, list(rounded.unbind()))


def without_wrapper(tensor: Any) -> Any:
    """A sharded weight that torchao wrapped for FSDP, as a plain DTensor on the same memory."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    inner = getattr(tensor.to_local(), "_tensor", None)
    if not isinstance(inner, Tensor):
        return tensor
    return DTensor.from_local(
        inner,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
