"""Step 6: DDP's gradients are those of one process over the whole batch, from the same weights."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from muster.checks.context import RankContext, RankReport
from muster.checks.findings import Finding, RankNames, find_outliers
from muster.parallel.mesh import Mesh

PER_RANK = 8  # samples
# float32 carries 7 digits; sums over a few hundred terms in another order lose one of them. A wrong
# scale, a missing rank or a stale weight moves gradients by far more.
TOLERANCE = 1e-5


def build() -> nn.Module:
    """The same weights on every rank where torch's random numbers are the same."""
    torch.manual_seed(20240501)
    return nn.Sequential(nn.Linear(24, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 8))


def measure(context: RankContext) -> RankReport:
    mesh = context.mesh
    model = build().to(mesh.device)
    drawn = digest(model)
    engine: nn.Module = model
    if mesh.world > 1:
        on = [mesh.device] if mesh.device.type == "cuda" else None
        engine = DistributedDataParallel(model, device_ids=on)
    synced = digest(model)
    inputs, targets = _whole_batch(mesh)
    mine = slice(mesh.rank * PER_RANK, (mesh.rank + 1) * PER_RANK)
    _loss(engine, inputs[mine], targets[mine]).backward()
    alone = copy.deepcopy(model).double()
    alone.zero_grad()
    _loss(alone, inputs.double(), targets.double()).backward()
    return {"drawn": drawn, "synced": synced, "distance": _distance(model, alone)}


def _whole_batch(mesh: Mesh) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(7)
    inputs = torch.randn(PER_RANK * mesh.world, 24, generator=numbers)
    targets = torch.randn(PER_RANK * mesh.world, 8, generator=numbers)
    return inputs.to(mesh.device), targets.to(mesh.device)


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return (model(inputs) - targets).square().mean()


def _distance(model: nn.Module, alone: nn.Module) -> float:
    """Between the two gradients, relative to the norm of the reference."""
    apart = size = 0.0
    for ours, right in zip(model.parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None
        assert right.grad is not None
        apart += float((ours.grad.double() - right.grad).square().sum())
        size += float(right.grad.square().sum())
    return (apart / size) ** 0.5


def digest(model: nn.Module) -> str:
    total = hashlib.sha256()
    for weight in model.parameters():
        total.update(weight.detach().cpu().numpy().tobytes())
    return total.hexdigest()[:16]


def judge(reports: Mapping[int, RankReport], rank_names: RankNames) -> list[Finding]:
    found = []
    for key, moment, cause, cure in (
        (
            "drawn",
            "initializes other weights from the same seed",
            "its torch or its random numbers differ from the others'",
            "install the same torch on every machine, and seed before the model is built",
        ),
        (
            "synced",
            "has other weights after DDP has broadcast rank 0's",
            "DDP's initial broadcast did not reach it, or something changes its weights",
            "see the collectives above; look for ECC errors of its device",
        ),
    ):
        _, odd = find_outliers({rank: report[key] for rank, report in reports.items()})
        if odd:
            message = f"{rank_names.names(odd)} {moment}"
            found.append(_fail(message, cause, cure, odd, rank_names))
    wrong = [rank for rank in sorted(reports) if not reports[rank]["distance"] < TOLERANCE]
    worst = max(reports, key=lambda rank: reports[rank]["distance"])
    figures = {"distance": reports[worst]["distance"]}
    if wrong:
        message = (
            f"gradients on {rank_names.names(wrong)} differ from those of one process over the whole batch "
            f"by {figures['distance']:.1e} of their norm (up to {TOLERANCE:.0e} is rounding)"
        )
        cause = "gradients are not averaged over all ranks, or start from other weights"
        cure = "fix what the steps above report; if nothing, reinstall torch"
        found.append(_fail(message, cause, cure, wrong, rank_names))
    if found:
        return found
    message = f"as of one process over the whole batch, to {figures['distance']:.1e}"
    return [Finding("gradients", "ok", message, figures=figures)]


def _fail(message: str, cause: str, cure: str, ranks: list[int], rank_names: RankNames) -> Finding:
    return Finding(
        "gradients",
        "fail",
        message,
        cause,
        cure,
        tuple(ranks),
        rank_names.hosts_of(ranks),
        figures={},
    )
