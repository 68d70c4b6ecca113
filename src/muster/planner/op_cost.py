"""Cost of one operation: FLOPs, and bytes read and written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

aten = torch.ops.aten

LOOKED_UP = ("embedding", "index", "gather", "nll_loss_forward")  # only the selected rows are read

Kind = Literal["matrix", "attention", "memory"]


@dataclass(frozen=True)
class OpCost:
    """One kernel. `flops` counts a multiplication and an addition as two."""

    name: str
    kind: Kind
    flops: float
    bytes: float  # read and written
    dtype: str  # "bfloat16", "float32" …
    shape: tuple[int, ...] = ()  # of a matrix product: batch, m, n, k

    @property
    def precision(self) -> str:
        return {"bfloat16": "bf16", "float16": "fp16"}.get(self.dtype, "fp32")


def measure(op: Any, args: tuple[Any, ...], outputs: list[Tensor]) -> OpCost | None:
    """The cost of a call; None for views."""
    inputs = list(_tensors(args))
    if is_view(inputs, outputs, op):
        return None
    kind, flops, shape = _flops(op, args, outputs)
    return OpCost(
        op._schema.name.removeprefix("aten::"),
        kind,
        flops,
        _traffic(op, args, inputs, outputs),
        _dtype(kind, inputs, outputs),
        shape,
    )


def is_view(inputs: list[Tensor], outputs: list[Tensor], op: Any) -> bool:
    if op._schema.is_mutable:
        return False
    if not outputs or op.is_view or op in (aten._unsafe_view.default, aten.lift_fresh.default):
        return True
    storages = {t.untyped_storage()._cdata for t in inputs}
    return all(t.untyped_storage()._cdata in storages for t in outputs)


def _tensors(values: Any) -> Any:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _traffic(op: Any, args: tuple[Any, ...], inputs: list[Tensor], outputs: list[Tensor]) -> float:
    """Each input is read once and each output written once; an in-place argument is both."""
    if op in (aten.empty_like.default, aten.empty.memory_format):
        return 0.0
    read = sum(_bytes(t) for t in inputs)
    if op._schema.name.removeprefix("aten::") in LOOKED_UP:
        read = sum(_bytes(t) for t in outputs)
    if op is aten.nll_loss_backward.default:
        read = 0
    changed = [
        tensor
        for argument, value in zip(op._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors([value])
    ]
    written = changed or outputs
    return float(read + sum(_bytes(t) for t in written))


def _bytes(tensor: Tensor) -> int:
    """Without expanded dimensions, which are read from cache."""
    numel = math.prod(n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
    return numel * tensor.element_size()


def _dtype(kind: Kind, inputs: list[Tensor], outputs: list[Tensor]) -> str:
    chosen = inputs if kind != "memory" and inputs else (outputs or inputs)
    floats = [t for t in chosen if t.is_floating_point()] or chosen
    return str(max(floats, key=Tensor.numel).dtype).removeprefix("torch.") if floats else ""


def _flops(
    op: Any, args: tuple[Any, ...], outputs: list[Tensor]
) -> tuple[Kind, float, tuple[int, ...]]:
    match op._schema.name.removeprefix("aten::"):
        case "mm" | "bmm":
            return _product(args[0], args[1])
        case "addmm" | "baddbmm" | "addbmm":
            return _product(args[1], args[2])
        case "convolution" | "cudnn_convolution" | "_convolution" | "mkldnn_convolution":
            return _convolution(args[1], outputs[0], passes=1)
        case "convolution_backward":
            return _convolution(args[2], args[0], passes=sum(args[-1][:2]))
        case name if name.startswith("_scaled_dot_product") and name.endswith("backward"):
            query, key = args[1], args[2]
            return _attention(query, key, _causal(op, args), products=5)
        case name if name.startswith("_scaled_dot_product"):
            return _attention(args[0], args[1], _causal(op, args), products=2)
    return "memory", 0.0, ()


def _product(a: Tensor, b: Tensor) -> tuple[Kind, float, tuple[int, ...]]:
    batch = a.shape[0] if a.dim() == 3 else 1
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    return "matrix", 2.0 * batch * m * n * k, (batch, m, n, k)


def _convolution(
    weight: Tensor, output: Tensor, passes: int
) -> tuple[Kind, float, tuple[int, ...]]:
    positions = output.numel() // output.shape[1]
    out, inside = weight.shape[0], math.prod(weight.shape[1:])
    return "matrix", 2.0 * passes * positions * out * inside, (passes, positions, out, inside)


def _attention(
    query: Tensor, key: Tensor, causal: bool, products: int
) -> tuple[Kind, float, tuple[int, ...]]:
    """The forward pass has two matrix products, the backward pass five. A causal mask skips half."""
    *outer, time, size = query.shape
    flops = 2.0 * products * math.prod(outer) * time * key.shape[-2] * size
    return (
        "attention",
        flops / 2 if causal else flops,
        (math.prod(outer), time, key.shape[-2], size),
    )


def _causal(op: Any, args: tuple[Any, ...]) -> bool:
    names = [argument.name for argument in op._schema.arguments]
    index = names.index("is_causal") if "is_causal" in names else -1
    return bool(args[index]) if 0 <= index < len(args) else False
