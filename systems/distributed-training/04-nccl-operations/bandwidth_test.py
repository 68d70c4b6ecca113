"""Bandwidth: why an all_reduce has two of them, and which one to compare with the hardware.

    torchrun --nproc_per_node=2 04-nccl-operations/bandwidth_test.py
    torchrun --nproc_per_node=8 04-nccl-operations/bandwidth_test.py --largest 256    # MiB, on GPUs

*Algorithm bandwidth* is the size of the array ÷ the time. It says how long your gradients take, and
falls as ranks are added although no link got slower. *Bus bandwidth* is what each rank's link really
carries: algorithm bandwidth × 2(n-1)/n. That is the number to hold against NVLink's or the network's.

Where 2(n-1)/n comes from is counted here, not told: a ring all_reduce written by hand adds up the
bytes that each rank sends. Asserted: they are 2(n-1)/n of the array; the ring's sum and all_reduce's
are right; and `muster bench collectives` uses the same factor.
"""

import argparse
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor

from muster.launch.cluster import own_arguments
from muster.launch.join import joined
from muster.parallel.mesh import Mesh
from muster.probes.collectives import bus_share

WARM_UP, REPEATS = 3, 20


def ring_all_reduce(mesh: Mesh, array: Tensor) -> int:
    """In place; returns the bytes this rank sent. The array is cut into as many parts as ranks.

    First lap: each part travels around and collects a sum (reduce_scatter). Second lap: each finished
    part travels around and is copied (all_gather). Each lap is n - 1 steps of one part.
    """
    n, rank = mesh.world, mesh.rank
    parts = list(array.view(n, -1))
    incoming, sent = torch.empty_like(parts[0]), 0
    for step in range(2 * (n - 1)):
        out, into = parts[(rank - step) % n], (rank - step - 1) % n
        pair = [
            dist.P2POp(dist.isend, out, (rank + 1) % n),
            dist.P2POp(dist.irecv, incoming, (rank - 1) % n),
        ]
        for request in dist.batch_isend_irecv(pair):
            request.wait()
        sent += out.nbytes
        if step < n - 1:
            parts[into] += incoming
        else:
            parts[into].copy_(incoming)
    return sent


def seconds(mesh: Mesh, array: Tensor) -> float:
    """Of one all_reduce: the median over repeats of the slowest rank's time. A GPU runs behind the
    program, so the clock is read only when it has caught up."""
    took = []
    for _ in range(WARM_UP + REPEATS):
        began = time.perf_counter()
        dist.all_reduce(array)
        if mesh.device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    slowest = [max(each) for each in zip(*mesh.gather(took), strict=True)]
    return statistics.median(slowest[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--largest", type=int, default=4, metavar="MIB", help="array, in MiB")
    options = parser.parse_args(own_arguments(sys.argv[1:]))
    with joined() as mesh:
        n = mesh.world
        factor = 2 * (n - 1) / n
        assert factor == bus_share("all_reduce", n), "muster bench counts otherwise"

        array = torch.full((3 * 5 * 7 * 8 * n,), float(mesh.rank + 1), device=mesh.device)
        sent = ring_all_reduce(mesh, array) if n > 1 else 0
        right = n * (n + 1) / 2  # 1 + 2 + … + n
        assert sent * n == 2 * (n - 1) * array.nbytes, f"sent {sent} of {array.nbytes} bytes"
        assert (array == right).all(), "the ring's sum is wrong"

        if mesh.first:
            print(f"{n} ranks, {dist.get_backend()}; GB = 10⁹ bytes; the times are this machine's")
            print("     size      median   algorithm         bus")
        size, largest, bus = 4 * 2**10, options.largest * 2**20, 0.0
        while size <= largest:
            array = torch.full((size // 4,), float(mesh.rank + 1), device=mesh.device)
            dist.all_reduce(array)
            assert (array == right).all(), f"all_reduce of {size} bytes is wrong"
            took = seconds(mesh, torch.zeros_like(array))
            algorithm = size / took / 1e9
            bus = algorithm * factor
            if mesh.first:
                print(
                    f"{size // 1024:>5} KiB {took * 1e6:>8.0f} µs {algorithm:>6.3f} GB/s {bus:>6.3f} GB/s"
                )
            size *= 8
        if mesh.first:
            print(
                f"a ring over {n} ranks sends {factor:.2f} × the array from each: bus bandwidth is "
                f"{factor:.2f} × algorithm bandwidth, {bus:.3f} GB/s at the largest; every sum is {right:.0f}"
            )


if __name__ == "__main__":
    main()
