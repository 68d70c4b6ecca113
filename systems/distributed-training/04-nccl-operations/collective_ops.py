"""Collectives: what every rank holds before, and what it holds after.

    torchrun --nproc_per_node=4 04-nccl-operations/collective_ops.py

A collective is one call that all ranks make together, in the same order, with tensors of the same
shape. Every strategy is made of a few of them: DDP is all_reduce, FSDP is all_gather and
reduce_scatter, a mixture of experts is all_to_all. The same lines run over NCCL on GPUs and over gloo
on CPUs.

Asserted on every rank: each collective gives what its definition says; an all_reduce is a
reduce_scatter followed by an all_gather; and nobody leaves a barrier before the last has come.
"""

import time

import torch
import torch.distributed as dist
from torch import Tensor

from muster.launch.join import joined
from muster.parallel.mesh import Mesh

# torch 2.13 renames these two; both names mean the same call.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def own(mesh: Mesh, count: int) -> Tensor:
    """Tens tell the rank, ones the position: rank 2 brings 20, 21, 22 …"""
    return 10 * mesh.rank + torch.arange(count, device=mesh.device)


def broadcast(mesh: Mesh) -> tuple[Tensor, Tensor, Tensor]:
    """one rank's tensor overwrites all others: how weights start out alike"""
    mine = own(mesh, 4)
    before = mine.clone()
    dist.broadcast(mine, src=0)
    return before, mine, torch.arange(4)


def all_reduce(mesh: Mesh) -> tuple[Tensor, Tensor, Tensor]:
    """every rank gets the sum of all: DDP's gradients"""
    mine = own(mesh, 4)
    before = mine.clone()
    dist.all_reduce(mine, op=dist.ReduceOp.SUM)  # in place
    return before, mine, mesh.world * torch.arange(4) + 10 * sum(range(mesh.world))


def reduce(mesh: Mesh) -> tuple[Tensor, Tensor, Tensor]:
    """only one rank gets the sum; what others then hold is not defined"""
    mine = own(mesh, 4)
    before = mine.clone()
    dist.reduce(mine, dst=0)
    total = mesh.world * torch.arange(4) + 10 * sum(range(mesh.world))
    return before, mine, total if mesh.rank == 0 else mine


def all_gather(mesh: Mesh) -> tuple[Tensor, Tensor, Tensor]:
    """every rank gets all parts, in the order of ranks: FSDP's weights before a layer"""
    mine = own(mesh, 2)
    whole = torch.empty(2 * mesh.world, dtype=mine.dtype, device=mesh.device)
    all_gather_single(whole, mine)
    return mine, whole, torch.cat([10 * r + torch.arange(2) for r in range(mesh.world)])


def reduce_scatter(mesh: Mesh) -> tuple[Tensor, Tensor, Tensor]:
    """rank r gets part r of the sum: FSDP's gradients after a layer"""
    mine = own(mesh, 2 * mesh.world)
    part = torch.empty(2, dtype=mine.dtype, device=mesh.device)
    reduce_scatter_single(part, mine)
    positions = 2 * mesh.rank + torch.arange(2)
    return mine, part, mesh.world * positions + 10 * sum(range(mesh.world))


def all_to_all(mesh: Mesh) -> tuple[Tensor, Tensor, Tensor]:
    """rank r's part s goes to rank s, as its part r: a matrix transposed"""
    mine = own(mesh, mesh.world)
    got = torch.empty_like(mine)
    dist.all_to_all_single(got, mine)
    return mine, got, 10 * torch.arange(mesh.world) + mesh.rank


def draw(mesh: Mesh, name: str, why: str, before: Tensor, after: Tensor) -> None:
    lines = mesh.gather((before.tolist(), after.tolist()))
    if mesh.first:
        print(f"\n{name}: {why}")
        width = max(len(str(old)) for old, _ in lines)
        for rank, (old, new) in enumerate(lines):
            print(f"  rank {rank}   {old!s:<{width}}  →  {new}")


def barrier(mesh: Mesh) -> float:
    """Nobody leaves before the last has come. Rank 0 comes half a second late and writes so into the
    store, where ranks find each other: who leaves must read it. Returns the seconds it took."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    began = time.perf_counter()
    if mesh.first:
        time.sleep(0.5)
        store.set("rank 0", "has come")
    dist.barrier()
    assert store.check(["rank 0"]), "passed the barrier before rank 0 had come"
    return time.perf_counter() - began


def main() -> None:
    with joined() as mesh:
        operations = (broadcast, all_reduce, reduce, all_gather, reduce_scatter, all_to_all)
        for operation in operations:
            before, after, expected = operation(mesh)
            draw(mesh, operation.__name__, operation.__doc__, before, after)
            assert after.tolist() == expected.tolist(), f"{operation.__name__}: {after.tolist()}"

        gradient = own(mesh, 2 * mesh.world)
        part, whole = gradient.new_empty(2), torch.empty_like(gradient)
        reduce_scatter_single(part, gradient)
        all_gather_single(whole, part)
        dist.all_reduce(gradient)
        assert torch.equal(whole, gradient), "all_reduce is reduce_scatter, then all_gather"

        waited = min(mesh.gather(barrier(mesh)))
        if mesh.first:
            print(
                f"\n{len(operations)} collectives right on {mesh.world} ranks ({dist.get_backend()}); "
                f"all_reduce = reduce_scatter + all_gather; the barrier held everyone {waited:.1f} s"
            )


if __name__ == "__main__":
    main()
