"""Data parallel training end to end: every rank holds the whole model and sees other images, and one
all-reduce per step turns their gradients into the gradient of the global batch.

    torchrun --nproc_per_node=4 01-ddp-basics/ddp_mnist.py
    srun --gpus=4 --ntasks=4 python 01-ddp-basics/ddp_mnist.py
    torchrun --nproc_per_node=4 01-ddp-basics/ddp_mnist.py --data FOLDER   # MNIST's four IDX files

Asserted: the first step's gradient is that of one process with the same global batch; the test score
counts every image once; all ranks end with the same weights, bit for bit; the accuracy is high.
"""

import argparse
import copy
import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from muster.launch.join import joined
from muster.parallel.mesh import Mesh
from muster.recipe.load import load
from muster.tasks import build_task
from muster.tasks.base import Task
from muster.training.precision import autocast, resolve_precision


def dataset(task: Task, split: str) -> TensorDataset:
    """(image, label, its number) of every image."""
    source = task.source(split)
    batch = task.collate([source.load(i) for i in range(len(source))], None)
    return TensorDataset(batch["images"], batch["labels"], torch.arange(len(source)))


def loss_of(model: nn.Module, images: Tensor, labels: Tensor, device: torch.device) -> Tensor:
    with autocast(resolve_precision("auto", device), device):  # bf16 on a GPU that has it
        logits = model(images.to(device))
    return F.cross_entropy(logits.float(), labels.to(device))


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def wrong_gradient(mine: Tensor, before: nn.Module, numbers: Tensor, train, mesh: Mesh) -> float:
    """How far the first gradient is from that of one process: it gets every rank's images at once."""
    together = torch.cat(mesh.gather(numbers))
    images, labels, _ = train[together]
    loss_of(before, images, labels, mesh.device).backward()
    reference = gradients(before)
    return float((mine - reference).norm() / reference.norm())


def accuracy(model: nn.Module, test: TensorDataset, mesh: Mesh) -> tuple[float, int]:
    """Share of right answers, and of how many.

    Not with DistributedSampler: it repeats images until all ranks have as many, and those would
    count twice. Each rank takes every world-th image instead, and the *counts* are summed. Ranks may
    hold different numbers of batches, so nothing in this loop may be a collective: `model` is the
    bare module, whose forward pass sends nothing.
    """
    counts = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # right, seen
    mine = Subset(test, range(mesh.rank, len(test), mesh.world))
    with torch.no_grad():
        for images, labels, _ in DataLoader(mine, batch_size=256):
            right = model(images.to(mesh.device)).argmax(-1).cpu() == labels
            counts += torch.tensor([right.sum(), len(labels)], device=mesh.device)
    dist.all_reduce(counts)
    return float(counts[0] / counts[1]), int(counts[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="folder with MNIST; default: scikit-learn's small digits")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64, help="global: shared by all ranks")
    parser.add_argument("--accuracy", type=float, default=0.9, help="the least to be reached")
    parser.add_argument("--save", type=Path, default=Path("runs/course/ddp_mnist.pt"))
    options = parser.parse_args()

    with joined() as mesh:
        if options.batch % mesh.world:
            raise SystemExit(f"--batch {options.batch}: no multiple of {mesh.world} ranks")
        named = ["mnist", [f"data.train={options.data}"]] if options.data else ["digits"]
        task = build_task(load(*named))
        train, test = dataset(task, "train"), dataset(task, "test")

        # Shuffled alike on every rank, by (seed, epoch); rank r takes places r, r + world, …
        sampler = DistributedSampler(train, mesh.world, mesh.rank, drop_last=True)
        loader = DataLoader(train, options.batch // mesh.world, sampler=sampler, drop_last=True)

        torch.manual_seed(0)  # the same start for any number of ranks
        plain = task.build_model().to(mesh.device)
        devices = [mesh.device.index] if mesh.device.type == "cuda" else None
        model = DistributedDataParallel(plain, device_ids=devices)  # sends rank 0's weights to all
        before = copy.deepcopy(plain)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

        off, orders = None, set()
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)  # without this, every epoch has the order of the first
            orders.add(tuple(sampler))
            for images, labels, numbers in loader:
                loss = loss_of(model, images, labels, mesh.device)
                loss.backward()  # gradients are averaged over the ranks while it still computes
                if off is None:
                    off = wrong_gradient(gradients(plain), before, numbers, train, mesh)
                optimizer.step()
                optimizer.zero_grad()
            if mesh.first:  # its own share's loss, not the mean over ranks
                print(f"epoch {epoch + 1}/{options.epochs}  loss {loss.item():.4f}", flush=True)

        score, seen = accuracy(plain, test, mesh)
        if mesh.first:  # all ranks hold the same, so one writes: under another name, then renamed
            options.save.parent.mkdir(parents=True, exist_ok=True)
            torch.save(plain.state_dict(), f"{options.save}.part")
            os.replace(f"{options.save}.part", options.save)
            print(f"saved {options.save}; images scored: {seen}, of {len(test)}")

        weights = torch.cat([p.detach().flatten() for p in plain.parameters()]).cpu()
        held = set(mesh.gather(hashlib.sha256(weights.numpy().tobytes()).hexdigest()))
        # float32 sums in another order differ by about 1e-6, bf16 rounds to 3 digits
        limit = 1e-4 if mesh.device.type == "cpu" else 3e-2
        assert off < limit, f"the first gradient is off by {off:.1e} of its length"
        assert len(orders) == options.epochs, "some epochs had the same order: set_epoch"
        assert seen == len(test), f"{seen} images scored, there are {len(test)}"
        assert len(held) == 1, f"{len(held)} different sets of weights on {mesh.world} ranks"
        assert score >= options.accuracy, f"accuracy {score:.2%}, expected {options.accuracy:.0%}"
        if mesh.first:
            print(
                f"claim holds on {mesh.world} rank(s): accuracy {score:.2%}, weights identical, first "
                f"gradient within {off:.0e} of one process's"
            )


if __name__ == "__main__":
    main()
