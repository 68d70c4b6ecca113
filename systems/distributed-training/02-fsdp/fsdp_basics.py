"""Fully sharded data parallel: each rank keeps 1/N of every weight, gradient and optimizer state, and
borrows the rest of a layer from the others just while that layer computes.

    torchrun --nproc_per_node=2 02-fsdp/fsdp_basics.py
    torchrun --nproc_per_node=4 02-fsdp/fsdp_basics.py --strategies     # sharding_strategies.md
    torchrun --nproc_per_node=8 02-fsdp/fsdp_basics.py --hidden 4096 --layers 16

Asserted, of each strategy: loss and gradient norm of every step are those of one process; ranks hold
what they should in bytes (of full_shard 1/N, together everything once) and send what theory says.
"""

import argparse
import math
from collections import Counter

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from muster.launch.join import joined
from muster.parallel.mesh import Mesh
from muster.planner.trace import Recorder


def build(options: argparse.Namespace, device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    wide = 4 * options.hidden
    layers = [
        nn.Sequential(nn.Linear(options.hidden, wide), nn.GELU(), nn.Linear(wide, options.hidden))
        for _ in range(options.layers)
    ]
    return nn.Sequential(*layers).to(device)


def spread(model: nn.Sequential, how: str, mesh: Mesh) -> nn.Module:
    """Layer by layer, then the whole: what is one `fully_shard` is gathered together. Parameters stay
    where they are in the model, but each becomes a DTensor that knows its whole shape."""
    kind = mesh.device.type
    if how == "no_shard":
        return DistributedDataParallel(model, [mesh.device.index] if kind == "cuda" else None)
    axes = init_device_mesh(kind, (mesh.world,))
    if how == "hybrid":  # shards within each half of the ranks (a node), copies across
        axes = init_device_mesh(kind, (2, mesh.world // 2), mesh_dim_names=("copies", "shards"))
    for layer in model:
        fully_shard(layer, mesh=axes, reshard_after_forward=how != "shard_grad_op")
    return fully_shard(model, mesh=axes)


def held(tensors) -> int:
    """Bytes on this rank: of a DTensor only the shard is here."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local)


def on_the_wire(recorder: Recorder) -> tuple[int, dict[str, int]]:
    """Bytes that this rank sends with the ring algorithm, and how often each collective was called."""
    total, calls = 0, Counter()
    for message, _ in recorder.trace.messages:
        n, kind = len(message.ranks), message.kind
        share = {"all_gather": n - 1, "reduce_scatter": (n - 1) / n, "all_reduce": 2 * (n - 1) / n}
        total += round(message.bytes * share[kind])
        calls[kind] += n > 1
    return total, dict(calls)


def run(options: argparse.Namespace, how: str, mesh: Mesh) -> dict:
    """A few steps: what they computed, what this rank held, what it sent in the last."""
    model = spread(build(options, mesh.device), how, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    path, share = [], options.batch // mesh.world
    for step in range(options.steps):
        x, y = (t.chunk(mesh.world)[mesh.rank] for t in batch_of(step, options, mesh.device))
        with Recorder() as recorder:  # muster's: sees every message below torch.distributed
            loss = (model(x) - y).square().mean()
            between = held(model.parameters())
            loss.backward()  # averaged over the ranks, whose shares are of one size
        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        path.append((mesh.sum(loss.item() * share)[0] / options.batch, norm.item()))
        gradients = held(p.grad for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    states = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    sent, calls = on_the_wire(recorder)
    return {
        "path": path,
        "weights": held(model.parameters()),
        "between": between,
        "gradients": gradients,
        "optimizer": held(states),
        "sent": sent,
        "calls": calls,
        "first": next(model.parameters()),
    }


def batch_of(step: int, options: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, options.batch, options.hidden, generator=generator).to(device)
    return x, y


def one_process(options: argparse.Namespace, device: torch.device) -> list[tuple[float, float]]:
    model, path = build(options, device), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(options.steps):
        x, y = batch_of(step, options, device)
        loss = (model(x) - y).square().mean()
        loss.backward()
        path.append((loss.item(), nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()))
        optimizer.step()
        optimizer.zero_grad()
    return path


def theory(how: str, size: int, world: int) -> float:
    """Bytes a rank sends per step, of a model of `size` bytes: a gather or a scatter moves
    (n − 1)/n of it, an all-reduce twice that."""
    shards, copies = {"no_shard": (1, world), "hybrid": (world // 2, 2)}.get(how, (world, 1))
    passes = 2 if how == "shard_grad_op" else 3  # gathered once or twice, and scattered
    return passes * size * (shards - 1) / shards + 2 * size / shards * (copies - 1) / copies


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32, help="global: shared by all ranks")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--strategies", action="store_true", help="all of them, with their traffic")
    options = parser.parse_args()

    with joined("fsdp") as mesh:
        if options.batch % mesh.world:
            raise SystemExit(f"--batch {options.batch}: no multiple of {mesh.world} ranks")
        names = (
            ["full_shard", "shard_grad_op", "no_shard"] if options.strategies else ["full_shard"]
        )
        if options.strategies and mesh.world % 2 == 0:
            names.insert(2, "hybrid")
        whole, n = held(build(options, mesh.device).parameters()), mesh.world
        reference = one_process(options, mesh.device)
        if mesh.first:
            print(
                f"model: {whole:,} bytes of weights, {n} rank(s); bytes on a rank, and sent by it"
            )
            print("strategy        weights  at backward  gradients  optimizer  sent a step  calls")
        for how in names:
            found = run(options, how, mesh)
            if mesh.first:
                columns = ("weights", "between", "gradients", "optimizer", "sent")
                row = "".join(
                    f"{found[c]:>{w},}" for c, w in zip(columns, (9, 13, 11, 11, 13), strict=False)
                )
                print(f"{how:14}{row}  {found['calls']}", flush=True)
            check(found, reference, how, whole, mesh)
            if how == "full_shard":
                shapes = mesh.gather(tuple(found["first"].to_local().shape))
                if mesh.first:
                    print(
                        f"  its first weight: {tuple(found['first'].shape)} = {found['first'].placements}"
                    )
                    print("  of which the ranks hold", *shapes)
                share, off = found["weights"] / whole, distance(found["path"], reference)
        if mesh.first:
            print(
                f"claim holds on {n} rank(s): the numbers of one process, within {off:.0e}, from "
                f"{', '.join(names)}; a rank of full_shard holds {share:.3f} of the model"
            )


def distance(path, reference) -> float:
    """The largest relative difference in loss or gradient norm."""
    pairs = zip(path, reference, strict=True)
    return max(abs(a / b - 1) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))


def check(found: dict, reference, how: str, whole: int, mesh: Mesh) -> None:
    off = distance(found["path"], reference)
    limit = 1e-5 if mesh.device.type == "cpu" else 1e-4  # float32 sums in other orders
    assert off < limit, f"{how}: loss or gradient norm is off by {off:.1e}"
    copies = {"no_shard": mesh.world, "hybrid": 2}.get(how, 1)
    for part, size in (("weights", whole), ("gradients", whole), ("optimizer", 2 * whole)):
        total = mesh.sum(found[part])[0]
        assert total == copies * size, f"{how}: all ranks hold {total} bytes of {part}, not {size}"
        # a first dimension that N does not divide leaves some ranks with a row more
        fair = copies * size / mesh.world
        assert found[part] <= 1.05 * fair, f"{how}: {found[part]} bytes of {part}, not {fair:.0f}"
    expected = theory(how, whole, mesh.world)
    assert abs(found["sent"] - expected) <= 0.05 * expected, f"{how}: {found['sent']} ≠ {expected}"


if __name__ == "__main__":
    main()
