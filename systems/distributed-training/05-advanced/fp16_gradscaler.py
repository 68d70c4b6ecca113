"""Training in float16: gradients that vanish, the loss scale that saves them, steps that are skipped.

    torchrun --nproc_per_node=2 05-advanced/fp16_gradscaler.py

float16 has no numbers between 0 and 6e-8, and none above 65504. Under autocast the gradients of
activations are float16: small ones become zero. `GradScaler` multiplies the loss by a large number before
the backward pass and divides the gradients by it before the optimizer step. Where the scale is so large
that something overflows, it leaves that step out and halves the scale. bfloat16 has float32's range and
needs none of this: take it where the GPU has it.

Two things go wrong with several ranks. Clipping before `unscale_` clips gradients that are still
multiplied. And all ranks must skip the same step, or their weights part: DDP's all-reduce carries an
infinity from one rank to all of them; with sharded gradients the ranks must agree by themselves.

Asserted on every rank, against float32: without scaling the gradient is lost; with it, it is the same
within float16's rounding; a step that overflows on rank 0 alone is skipped by all, which halve the
scale, and all ranks keep the same weights.
"""

import argparse
import copy
import sys

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from muster.launch.cluster import own_arguments
from muster.launch.join import joined

SCALE = 2.0**16
TINY = 1e-7  # the weight of this loss: its gradients are below float16's smallest number


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rows", type=int, default=32, help="samples per rank")
    parser.add_argument("--steps", type=int, default=6)
    return parser.parse_args(own_arguments(sys.argv[1:]))


def loss_of(model: nn.Module, x: Tensor, half: bool) -> Tensor:
    with torch.autocast(x.device.type, torch.float16, enabled=half):
        y = model(x)
    return TINY * (y.float() - x[:, :1]).square().mean()  # the loss itself in float32


def gradient(model: nn.Module, x: Tensor, scale: float, half: bool) -> Tensor:
    """Of all ranks' samples, as the optimizer would see it."""
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    (scale * loss_of(wrapped, x, half)).backward()
    return torch.cat([p.grad.flatten() for p in wrapped.parameters()]) / scale


def apart(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def train(model: nn.Module, x: Tensor, mesh, steps: int) -> tuple[list[float], list[bool]]:
    """Scales after each step, and whether the weights moved. In step 1 rank 0 has an outlier."""
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(mesh.device.type, init_scale=SCALE)
    scales, moved = [], []
    for step in range(steps):
        before = [p.detach().clone() for p in model.parameters()]
        outlier = 1e9 if step == 1 and mesh.first else 1.0  # only on rank 0
        optimizer.zero_grad()
        scaler.scale(outlier * loss_of(wrapped, x, half=True)).backward()
        scaler.unscale_(optimizer)  # before clipping: the norm of the true gradient
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)  # not if unscale_ found an infinity
        scaler.update()  # halves the scale then; doubles it after many good steps
        scales.append(scaler.get_scale())
        moved.append(any((a != b).any() for a, b in zip(before, model.parameters(), strict=True)))
    return scales, moved


def main() -> None:
    wanted = options()
    with joined("ddp") as mesh:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, wanted.hidden), nn.GELU(), nn.Linear(wanted.hidden, 1)
        ).to(mesh.device)
        generator = torch.Generator().manual_seed(mesh.rank)
        x = torch.randn(wanted.rows, 64, generator=generator).to(mesh.device)
        exact = gradient(model, x, 1.0, half=False)
        lost = apart(gradient(model, x, 1.0, half=True), exact)
        kept = apart(gradient(model, x, SCALE, half=True), exact)
        assert lost > 0.1, f"unscaled, the gradient is only {lost:.1e} off"
        assert kept < 1e-2, f"scaled, the gradient is {kept:.1e} off"
        scales, moved = train(model, x, mesh, wanted.steps)
        assert moved == [step != 1 for step in range(wanted.steps)], f"moved in steps {moved}"
        assert scales == [SCALE] + [SCALE / 2] * (wanted.steps - 1), f"scales {scales}"
        weights = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()
        assert all(torch.equal(weights, theirs) for theirs in mesh.gather(weights)), "weights part"
        if mesh.first:
            print(f"float16 without a scale   {lost:.0%} of the gradient is lost")
            print(f"float16, loss × {SCALE:.0f}    {kept:.0e} from float32's")
            print(f"scale after each step     {' '.join(f'{scale:.0f}' for scale in scales)}")
            print(
                f"{mesh.world} rank(s): {lost:.0%} of an unscaled float16 gradient is lost, scaled it "
                f"is within {kept:.0e}; all ranks skipped the step that overflowed on rank 0"
            )


if __name__ == "__main__":
    main()
