"""AdamW whose two averages take 8 bits each, in blocks of 256 with a scale, by torchao's quantization."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from muster.parallel.compilation import compiler_error
from muster.parallel.optimizers.base import CountingOptimizer, as_shards, local
from muster.parallel.optimizers.facts import BLOCK, quantizes, refuse_missing_library

AT_A_TIME = 2**22 // BLOCK  # blocks, where nothing is compiled: quantizing takes many copies
AVERAGES = {"exp_avg": True, "exp_avg_sq": False}  # whether it is signed


class AdamW8bit(CountingOptimizer):
    """As torchao.optim.AdamW8bit computes it. Codes and scales are local tensors: where a shard begins
    decides which elements share a block."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        refuse_missing_library("adamw-8bit")
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        mine = local(p)
        made = {"step": self.count(mine)}
        for name in AVERAGES:
            if quantizes(mine.numel()):
                made[name] = torch.zeros_like(mine, dtype=torch.uint8)
                made[_scale(name)] = torch.zeros(mine.numel() // BLOCK, device=mine.device)
            else:
                made[name] = torch.zeros_like(mine)
        return made

    def update(self, group: dict[str, Any], members: list[Tensor], gradients: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        # A number would be compiled anew; filled on the device, so that the host does not wait.
        lr = torch.full((), group["lr"], device=local(members[0]).device)
        for p, g in zip(members, gradients, strict=True):
            mine, state = local(p), self.state[p]
            skip = self.found_inf if self.found_inf is not None else torch.zeros_like(lr)
            numbers = (
                self.count(mine),
                skip,
                lr,
                beta1,
                beta2,
                group["weight_decay"],
                group["eps"],
            )
            if not quantizes(mine.numel()):
                _update(mine, g, state["exp_avg"], state["exp_avg_sq"], *numbers)
                continue
            blocks = [mine.view(-1, BLOCK), g.reshape(-1, BLOCK)]
            for name in AVERAGES:
                blocks += [state[name].view(-1, BLOCK), state[_scale(name)].view(-1, 1)]
            plain: Callable[..., None] = _update_blocks
            maps = [_map(signed, mine.device) for signed in AVERAGES.values()]
            if mine.device.type == "cuda" and _compiles(mine.device):
                _compiled()(*blocks, *maps, *numbers)
                continue
            for start in range(0, len(blocks[0]), AT_A_TIME):
                part = [t[start : start + AT_A_TIME] for t in blocks]
                plain(*part, *maps, *numbers)

    def saved_state(self, p: Tensor) -> dict[str, Tensor]:
        """Both averages in float32, on the host, since other layouts have other blocks. Quantizing them
        again in the same blocks gives the same codes and scales."""
        found = {}
        for name, signed in AVERAGES.items():
            value = self.state[p][name]
            if value.dtype == torch.uint8:
                scale = self.state[p][_scale(name)]
                value = _dequantized(value, scale, signed)
            whole = as_shards(p, value.cpu(), tuple(p.shape))
            found[name] = whole
        return found

    @torch.no_grad()
    def restore(self, p: Tensor, saved: dict[str, Tensor]) -> None:
        state = self.state[p]
        for name, signed in AVERAGES.items():
            value = saved[name]
            mine = (value.to_local() if isinstance(value, DTensor) else value).to(local(p).device)
            if state[name].dtype == torch.uint8:
                codes, scale = _quantized(mine.view(-1, BLOCK), _map(signed, mine.device))
                state[name].copy_(codes.view_as(state[name]))
                state[_scale(name)].copy_(scale.view(-1))
            else:
                state[name].copy_(mine)


@cache
def _compiles(device: torch.device) -> bool:
    return find_spec("triton") is not None and compiler_error(device) is None


def _scale(name: str) -> str:
    return f"{name}_scale"


@cache
def _map(signed: bool, device: torch.device) -> Tensor:
    """The 256 values between -1 (or 0) and 1 that a code may stand for, ascending."""
    from torchao.optim.quant_utils import create_dynamic_map

    return torch.tensor(create_dynamic_map(signed=signed), device=device)


def _quantized(blocks: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and, per block, the scale: its largest absolute value."""
    from torchao.optim.quant_utils import quantize_8bit_with_qmap, scale_tensor

    scaled, scale = scale_tensor(blocks, BLOCK)
    return quantize_8bit_with_qmap(scaled, values), scale.view(-1, 1)


def _dequantized(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """As stored in a checkpoint. The lowest signed code stands for -0.993 of the scale; stored is the whole
    scale, which most of them were: so the largest value of a block gives its scale again."""
    values = _map(signed, codes.device)
    if signed:
        values = values.clone()
        values[0] = -1.0
    return (values[codes.int()].view(-1, BLOCK) * scale.view(-1, 1)).view(codes.shape)


def _update(
    p: Tensor,
    g: Tensor,
    average: Tensor,
    square: Tensor,
    step: Tensor,
    skip: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
) -> None:
    """One step, in place; none where `skip` is 1."""
    first, second = average.lerp(g, 1 - beta1), square.lerp(g.square(), 1 - beta2)
    changed = _stepped(p, first, second, step, lr, beta1, beta2, weight_decay, eps)
    for target, value in ((average, first), (square, second), (p, changed)):
        target.copy_(torch.where(skip > 0, target, value))


def _update_blocks(
    p: Tensor,
    g: Tensor,
    codes: Tensor,
    scale: Tensor,
    square_codes: Tensor,
    square_scale: Tensor,
    values: Tensor,
    square_values: Tensor,
    step: Tensor,
    skip: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
) -> None:
    """The same on blocks, [n, 256], of quantized averages with their scales, [n, 1]."""
    first = (values[codes.int()] * scale).lerp(g, 1 - beta1)
    second = (square_values[square_codes.int()] * square_scale).lerp(g.square(), 1 - beta2)
    changed = _stepped(p, first, second, step, lr, beta1, beta2, weight_decay, eps)
    pairs = zip(_quantized(first, values), (codes, scale), strict=True)
    others = zip(_quantized(second, square_values), (square_codes, square_scale), strict=True)
    for value, target in (*pairs, *others, (changed, p)):
        target.copy_(torch.where(skip > 0, target, value))


def _stepped(
    p: Tensor,
    average: Tensor,
    square: Tensor,
    step: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
) -> Tensor:
    root = square.sqrt() / (1 - beta2**step).sqrt() + eps
    return p - lr * weight_decay * p - lr * (average / (1 - beta1**step)) / root


@cache
def _compiled() -> Callable[..., None]:
    """One program for all parameters: the number of blocks is not compiled into it."""
    return torch.compile(_update_blocks, dynamic=True, fullgraph=True)
