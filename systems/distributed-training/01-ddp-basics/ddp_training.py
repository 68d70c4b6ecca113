"""A template for real runs: muster's loop in the open. The recipe fixes the global batch and the
optimizer steps; ranks, nodes, restarts and resumes change where it runs, never what is computed.

    torchrun --nproc_per_node=4 01-ddp-basics/ddp_training.py
    torchrun --nproc_per_node=4 01-ddp-basics/ddp_training.py --recipe gpt2 --train-only
    torchrun --nnodes=2 --nproc_per_node=4 \\
        --node_rank=0 --master_addr=10.0.0.1 --master_port=29500 01-ddp-basics/ddp_training.py

(and the last with --node_rank=1 on the second node). Stop it with SIGTERM, start it again: it goes on;
where all steps were done, it begins again.
Asserted: losses and gradient norms are those of one process that never stopped and never accumulated;
stopped half-way and resumed is equal to straight through, bit for bit on CPUs.
"""

import argparse
import math
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from muster.data.batches import BatchPlan
from muster.data.loader import Loader
from muster.errors import CheckpointError
from muster.launch.cluster import own_arguments
from muster.launch.join import joined
from muster.observe import stopping
from muster.parallel.materialise import materialise
from muster.parallel.mesh import Mesh
from muster.recipe.batch import solve
from muster.recipe.load import load
from muster.recipe.schema import Recipe
from muster.tasks import build_task
from muster.tasks.base import Task
from muster.training.optimizer import learning_rate, make_optimizer, seed_step
from muster.training.precision import autocast, resolve_precision

SMALL = ["training.steps=12", "training.warmup_steps=4", "training.per_device_batch_size=4"]
SMALL += ["data.sequence_length=64", "checkpoint.every_steps=5"]
History = dict[int, tuple[float, float]]  # loss and gradient norm by step


def prepare(task: Task, recipe: Recipe, rank: int, ranks: int, device: torch.device):
    """Global batches are planned for all ranks together: each rank has as many micro-batches, and
    those of step n are known without walking there."""
    sizes, source = solve(recipe.training, ranks), task.source("train")
    windows = task.windows(source.lengths, training=True)
    plan = BatchPlan(
        source.lengths, sizes.global_batch, recipe.seed, groups=source.groups, windows=windows
    )
    loader = Loader(
        source, plan, task.collate, rank=rank, ranks=ranks, accumulation=sizes.accumulation
    )
    torch.manual_seed(recipe.seed)
    model = task.build_model().to(device)
    if weights := task.weights():
        materialise(model, weights, device)
    return loader, model, make_optimizer(recipe.training, model.named_parameters())


def loss_of(model: nn.Module, task: Task, recipe: Recipe, batch, device: torch.device):
    """Summed over the micro-batch's units (tokens, clips, images)."""
    batch = task.prepare(batch.to(device))
    inputs = task.inputs(batch)
    with autocast(resolve_precision(recipe.training.precision, device), device):
        return task.loss(model(*inputs.args, **inputs.shared), batch)


def update(model: nn.Module, optimizer, recipe: Recipe, step: int, steps: int) -> float:
    limit = recipe.training.max_grad_norm or math.inf
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit).item()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(recipe.training, step, steps)  # the clock: optimizer steps
    if math.isfinite(norm):  # the same on all ranks, so all of them skip a bad step or none does
        optimizer.step()
    optimizer.zero_grad()
    return norm


def save(path: Path, state: dict[str, Any]) -> None:
    """Whole or not at all: killed in here, a process leaves the last checkpoint as it was."""
    with path.with_suffix(".part").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path.with_suffix(".part"), path)


def finished(path: Path) -> Path:
    """Where the last checkpoint goes: a run that begins again must not overwrite it half-way."""
    return path.with_name("finished.pt")


def restore(path: Path, mesh: Mesh, fixed: list[int]) -> dict[str, Any] | None:
    """Rank 0 reads and tells the others: only its node needs the disk."""
    found: list[Any] = [None]
    path = path if path.is_file() else finished(path)
    if mesh.first and path.is_file():
        found = [torch.load(path, map_location="cpu", weights_only=True)]
    if mesh.world > 1:
        dist.broadcast_object_list(found)
    if found[0] and found[0]["fixed"] != fixed:
        raise CheckpointError(
            f"{path.parent} has seed, global batch and steps {found[0]['fixed']}, this run {fixed}: "
            "step n would mean other samples; remove it or choose another --folder"
        )
    return found[0]


def train(task: Task, recipe: Recipe, mesh: Mesh, path: Path, until: int = 0, talk=True) -> History:
    """All steps that are left, or those before `until`."""
    device, seed = mesh.device, recipe.seed
    loader, model, optimizer = prepare(task, recipe, mesh.rank, mesh.world, device)
    steps = recipe.training.steps or loader.plan.steps_per_epoch * recipe.training.epochs
    fixed, start, every = [seed, loader.plan.batch_size, steps], 0, recipe.checkpoint.every_steps
    saved = restore(path, mesh, fixed)
    if saved and saved["step"] < steps:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]  # which is also the place in the data and in the schedule
        if mesh.first and talk:
            print(f"resumed after step {start} of {steps} from {path}", flush=True)
    elif saved and mesh.first and talk:
        print(f"all {steps} steps were done: beginning again", flush=True)
    devices = [device.index] if device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    # DDP settles its buckets by the first backward pass and adds up in their order. Done here and
    # thrown away, so that the first step after a resume adds as it would have without.
    ddp.eval()  # leaves batch statistics alone
    loss_of(ddp, task, recipe, loader.micro_batches(start)[0], device).backward()
    ddp.train()
    optimizer.zero_grad()

    history: History = {}
    for step, batches in enumerate(loader.steps(start, until or steps), start):
        seed_step(seed, step, mesh.rank)  # for dropout; so no random state needs to be saved
        units, _ = mesh.sum(sum(batch.units for batch in batches))  # of the whole global batch
        total = 0.0
        for i, batch in enumerate(batches, 1):
            with nullcontext() if i == len(batches) else ddp.no_sync():  # send once, with the last
                loss = loss_of(ddp, task, recipe, batch, device)
                # Divided once, by all ranks' units. DDP will average over the ranks where we want
                # the sum, hence × world.
                (loss * mesh.world / units).backward()
            total += loss.item()
        norm = update(model, optimizer, recipe, step, steps)
        # If one rank was asked to stop, all leave after this very step: else some wait for ever.
        total, stop = mesh.sum(total, everyone=stopping.asked.is_set())
        history[step], done = (total / units, norm), step + 1
        if mesh.first and talk:
            print(f"step {done}/{steps}  loss {total / units:.4f}  gradient {norm:.3f}", flush=True)
        if mesh.first and (stop or done in (until, steps) or (every and done % every == 0)):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(finished(path) if done == steps else path, {**state, "step": done, "fixed": fixed})
            if done == steps:
                path.unlink(missing_ok=True)
        if stop:
            break
    mesh.barrier()
    if mesh.first and talk and done < steps:
        print(f"stopped after step {done} of {steps}; start it again to go on")
    return history


def alone(task: Task, recipe: Recipe, device: torch.device, steps: int) -> History:
    """One process without DDP or accumulation, never stopped: what every run should compute."""
    loader, model, optimizer = prepare(task, recipe, 0, 1, device)
    loader.accumulation, history = 1, {}
    for step in range(steps):
        (batch,) = loader.micro_batches(step)
        loss = loss_of(model, task, recipe, batch, device) / batch.units
        loss.backward()
        history[step] = loss.item(), update(model, optimizer, recipe, step, steps)
    return history


def prove(task: Task, recipe: Recipe, mesh: Mesh, history: History, folder: Path) -> str:
    steps = max(history) + 1
    half = max(1, steps // 2)
    with TemporaryDirectory(dir=folder) as own:
        path = Path(own, "latest.pt")
        train(task, recipe, mesh, path, until=half, talk=False)
        resumed = train(task, recipe, mesh, path, talk=False)
        (stopped,) = mesh.sum(everyone=stopping.asked.is_set())
    if stopped or not mesh.first:
        return ""
    on_cpu = mesh.device.type == "cpu"
    one = alone(task, recipe, mesh.device, steps)
    off = [max(abs(history[s][k] / one[s][k] - 1) for s in history) for k in (0, 1)]
    again = max(abs(resumed[s][k] - history[s][k]) for s in resumed if s in history for k in (0, 1))
    # float32 sums in another order; bf16 has 3 digits; on GPUs some kernels add in no fixed order
    limits = (1e-5, 1e-4, 0.0) if on_cpu else (1e-2, 5e-2, 5e-2)
    for found, limit, what in zip((*off, again), limits, ("loss", "norm", "resumed"), strict=True):
        assert found <= limit, f"{what} is off by {found:.1e}, at most {limit} is rounding"
    how = f"stopped after {half} and resumed" if half < steps else "begun again"
    return (
        f"claim holds on {mesh.world} rank(s): loss and gradient norm of {len(history)} steps within "
        f"{max(off):.0e} of one process's; {how} differs by {again:g}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", help="of `muster recipe list`, or a file; default: a small one")
    parser.add_argument("--folder", type=Path, default=Path("runs/course/ddp_training"))
    parser.add_argument("--train-only", action="store_true", help="no proof at the end")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args(own_arguments(sys.argv[1:]))
    stopping.listen(signal.SIGTERM, signal.SIGUSR1)  # sets a flag; saving in a handler is not safe

    with joined() as mesh:
        small = [] if options.recipe else SMALL
        recipe = load(options.recipe or "gpt-micro", [*small, *options.overrides])
        task = build_task(recipe)
        options.folder.mkdir(parents=True, exist_ok=True)
        history = train(task, recipe, mesh, options.folder / "latest.pt")
        (stopped,) = mesh.sum(everyone=stopping.asked.is_set())
        if not (options.train_only or stopped):
            print(prove(task, recipe, mesh, history, options.folder), end="\n" * mesh.first)


if __name__ == "__main__":
    main()
