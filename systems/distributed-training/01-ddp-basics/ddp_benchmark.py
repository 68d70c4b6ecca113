"""Weak scaling: every rank keeps its batch as ranks are added, so a perfect machine does N times the
work in the same time. Measured here: rank 0 alone with the others idle, and all ranks together, in
turns, so that both see the same machine.

    torchrun --nproc_per_node=2 01-ddp-basics/ddp_benchmark.py
    torchrun --nproc_per_node=8 01-ddp-basics/ddp_benchmark.py --preset gpt2 --batch 16 --length 1024

Asserted: the gradients that were timed are those of one process with all ranks' batches. CPU ranks
share a machine's memory and caches, and whatever else runs there: their efficiency is about that
machine, not about DDP. `muster bench scaling` looks closer.
"""

import argparse
import copy
import statistics
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from muster import models
from muster.launch.join import joined
from muster.parallel.mesh import Mesh
from muster.tasks.likelihood import negative_log_likelihood
from muster.training.precision import autocast, resolve_precision

ROUNDS = 3
VOCAB = 257


def tokens_of(rank: int, options: argparse.Namespace) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(VOCAB, (options.batch, options.length + 1), generator=generator)


def backward(model: nn.Module, tokens: Tensor, device: torch.device) -> None:
    model.zero_grad()
    tokens = tokens.to(device)
    with autocast(resolve_precision("auto", device), device):
        logits = model(tokens[:, :-1])
    (
        negative_log_likelihood(logits, tokens[:, 1:], VOCAB, "sum") / tokens[:, 1:].numel()
    ).backward()


def seconds(model: nn.Module, tokens: Tensor, mesh: Mesh, steps: int, send: bool = True) -> float:
    """A step's time. The first is for the caches, and for DDP to settle its buckets."""
    with nullcontext() if send else model.no_sync():
        for step in range(steps + 1):
            if step == 1:
                begin = now(mesh)
            backward(model, tokens, mesh.device)
    return (now(mesh) - begin) / steps


def now(mesh: Mesh) -> float:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", default="gpt2-micro", help="a language model of muster's")
    parser.add_argument("--batch", type=int, default=4, help="sequences, on each rank")
    parser.add_argument("--length", type=int, default=64, help="tokens of each")
    parser.add_argument("--steps", type=int, default=5, help="timed in each of three rounds")
    options = parser.parse_args()

    with joined() as mesh:
        torch.manual_seed(0)
        plain = models.build(options.preset, vocab=VOCAB).to(mesh.device)
        devices = [mesh.device.index] if mesh.device.type == "cuda" else None
        together = DistributedDataParallel(plain, device_ids=devices)
        only_me = dist.new_group([0])  # all ranks must call this, also those that are not in it
        if mesh.first:
            copied = copy.deepcopy(plain)
            solo = DistributedDataParallel(copied, device_ids=devices, process_group=only_me)
        mine = tokens_of(mesh.rank, options)
        times: dict[str, list[float]] = {"alone": [], "together": [], "silent": []}
        for _ in range(ROUNDS):
            if mesh.first:
                times["alone"].append(seconds(solo, mine, mesh, options.steps))
            mesh.barrier()  # the others have been idle until here
            for name in ("together", "silent"):
                took = seconds(together, mine, mesh, options.steps, send=name == "together")
                times[name].append(max(mesh.gather(took)))  # a step is as slow as its slowest rank
                if name == "together":
                    found = gradient(plain).clone()
        if mesh.first:
            report(mesh, options, times, plain, gradient(copied), found)
        mesh.barrier()


def report(
    mesh: Mesh, options, times, plain: nn.Module, found_alone: Tensor, found: Tensor
) -> None:
    alone, together, silent = (statistics.median(times[name]) for name in times)
    rate = options.batch * options.length
    efficiency = alone / together
    exposed = max(0.0, 1 - silent / together)
    sent = found.numel() * found.element_size() / 1e6
    print(f"{'':9}tokens/s, on this machine")
    print(f"1 rank   {rate / alone:8.0f}")
    print(
        f"{mesh.world} ranks  {rate * mesh.world / together:8.0f}   {sent:.1f} MB all-reduced a step"
    )
    print(
        f"share of a step spent waiting for the all-reduce, not hidden by computing: {exposed:.0%}"
    )

    off = []
    for got, ranks in ((found_alone, 1), (found, mesh.world)):
        expected = torch.zeros_like(got)
        for rank in range(ranks):
            backward(plain, tokens_of(rank, options), mesh.device)
            expected += gradient(plain) / ranks  # DDP averages over the ranks
        off.append(float((got - expected).norm() / expected.norm()))
    limit = 1e-5 if mesh.device.type == "cpu" else 1e-2  # other orders of sums; bf16
    assert max(off) < limit, f"gradients are off by {off} of their length, more than {limit}"
    if efficiency > 1.1:
        print("more than all of it: other work slowed rank 0 down while it was alone")
    print(
        f"claim holds on {mesh.world} rank(s): weak-scaling efficiency {efficiency:.2f}, gradients "
        f"within {max(off):.0e} of one process's"
    )


if __name__ == "__main__":
    main()
