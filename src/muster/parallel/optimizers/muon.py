"""Muon: the momentum of a hidden matrix, orthogonalized. AdamW updates everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from muster.parallel.materialise import local_part
from muster.parallel.optimizers.base import DeviceOptimizer, local, zeros_like
from muster.parallel.optimizers.facts import NEWTON_SCHULZ_STEPS
from muster.torch_internals import _adjust_lr, _zeropower_via_newtonschulz

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # torch.optim.Muon's defaults, as are the next two
EPS = 1e-7
ADJUSTED = "match_rms_adamw"  # so that AdamW's learning rate and weight decay suit both
ADAMW_STATE = ("exp_avg", "exp_avg_sq")


class Muon(DeviceOptimizer):
    """torch.optim.Muon on the matrices of `hidden`, and fused AdamW on the parameters of `others`: one
    optimizer, one learning rate.

    Orthogonalizing takes the whole matrix. Momentum stays in shards; the update is gathered in bfloat16,
    which is what torch computes in, every rank orthogonalizes it and takes its shard. On CPUs it stays
    float32: products in bfloat16 take them four times as long.
    """

    def __init__(
        self,
        hidden: Iterable[dict[str, Any]],
        others: list[dict[str, Any]],
        lr: float,
        momentum: float,
        **adamw: Any,
    ) -> None:
        self.adamw = AdamW(others, lr=lr, **adamw) if others else None
        shared = self.adamw.param_groups if self.adamw else []
        for group in shared:
            group["momentum"] = None
        super().__init__([*hidden, *shared], {"lr": lr, "weight_decay": 0.0, "momentum": momentum})
        if self.adamw:
            self.adamw.state = self.state
        self._hidden = {
            p for g in self.param_groups if g["momentum"] is not None for p in g["params"]
        }

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        if p in self._hidden:
            return {"momentum_buffer": zeros_like(p)}
        assert self.adamw is not None
        device = p.device if self.adamw.defaults["fused"] else "cpu"
        return {
            "step": torch.zeros((), device=device),
            **{name: torch.zeros_like(p) for name in ADAMW_STATE},
        }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step()
        if self.adamw is not None:
            fused: Any = self.adamw
            fused.grad_scale, fused.found_inf = self.grad_scale, self.found_inf
            fused.step()

    def updates(self, group: dict[str, Any]) -> bool:
        return group["momentum"] is not None

    def update(self, group: dict[str, Any], members: list[Tensor], gradients: list[Tensor]) -> None:
        momentum, lr = group["momentum"], group["lr"]
        for p, g in zip(members, gradients, strict=True):
            buffer, weight = local(self.state[p]["momentum_buffer"]), local(p)
            average = buffer.lerp(g, 1 - momentum)
            update = _orthogonalized(_whole(p, g.lerp(average, momentum).to(_computes_in(p))))
            own = update[local_part(p)[1]].to(weight.device)
            self.set_(buffer, average)
            decayed = weight * (1 - lr * group["weight_decay"])
            self.set_(weight, decayed.add_(own, alpha=-_adjust_lr(lr, ADJUSTED, p.shape)))


def _computes_in(p: Tensor) -> torch.dtype:
    where = p.device_mesh.device_type if isinstance(p, DTensor) else p.device.type
    return torch.float32 if where == "cpu" else torch.bfloat16


def _orthogonalized(matrix: Tensor) -> Tensor:
    if matrix.dtype != torch.float32:
        return _zeropower_via_newtonschulz(matrix, COEFFICIENTS, NEWTON_SCHULZ_STEPS, EPS)
    a, b, c = COEFFICIENTS  # torch's steps, which it takes in bfloat16 only
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=EPS)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _whole(p: Tensor, mine: Tensor) -> Tensor:
    """The matrix that `mine` is this rank's shard of, as `p` is sharded."""
    if not isinstance(p, DTensor):
        return mine
    return DTensor.from_local(
        mine.to(p.device_mesh.device_type),  # an offloaded shard is on the host
        p.device_mesh,
        p.placements,
        run_check=False,
        shape=p.shape,
        stride=p.stride(),
    ).full_tensor()
