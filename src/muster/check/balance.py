"""Step 6: the same matrix work on every rank at once; the slowest against the median."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import torch

from muster.check.findings import SLOW, TOO_SLOW, Finding, Roll, Status
from muster.check.seat import Account, Seat

WINDOWS = 8
WINDOW_S = 0.2  # many turns of the scheduler: a core that is shared is shared in every window


def measure(seat: Seat) -> Account:
    """TFLOP/s of the best window: what disturbs for a moment is forgiven, what stays is not."""
    mesh = seat.mesh
    gpu = mesh.device.type == "cuda"
    side, kind, burst = (4096, torch.bfloat16, 16) if gpu else (256, torch.float32, 4)
    a = torch.randn(side, side, device=mesh.device).to(kind)
    out = torch.empty_like(a)

    def work(seconds: float) -> float:
        started, done = time.perf_counter(), 0
        while (passed := time.perf_counter() - started) < seconds:
            for _ in range(burst):
                torch.mm(a, a, out=out)
            if gpu:
                torch.cuda.synchronize(mesh.device)
            done += burst
        return done * 2 * side**3 / passed / 1e12

    work(WINDOW_S)  # clocks rise, caches and kernels are made ready
    mesh.barrier()
    return {"tflops": max(work(WINDOW_S) for _ in range(WINDOWS)), "gpu": gpu}


def judge(accounts: Mapping[int, Account], roll: Roll) -> list[Finding]:
    speeds = {rank: accounts[rank]["tflops"] for rank in sorted(accounts)}
    usual = statistics.median_high(speeds.values())
    slowest = min(speeds, key=lambda rank: speeds[rank])
    ratio = usual / speeds[slowest]
    figures = {"slowest_over_median": ratio, "median_tflops": usual}
    if ratio <= SLOW:
        words = f"slowest rank {ratio:.2f} × the median time ({usual:.3g} TFLOP/s)"
        return [Finding("balance", "ok", words, figures=figures)]
    slow = [rank for rank in speeds if usual / speeds[rank] > SLOW]
    status: Status = "fail" if ratio > TOO_SLOW else "warn"
    gpu = accounts[slowest]["gpu"]
    return [
        Finding(
            "balance",
            status,
            f"{roll.names(slow)}: the same work takes {ratio:.2f} × the median time, and in "
            "training all others wait for it",
            cause="a throttled or shared GPU, or a slower model than the others"
            if gpu
            else "another process on the same cores, fewer cores than the others, or a throttled CPU",
            cure="see `nvidia-smi -q -d PERFORMANCE` and the processes on it; cool it, or leave it out "
            "with CUDA_VISIBLE_DEVICES"
            if gpu
            else "look at `top` there, end what competes, and give every rank as many cores",
            ranks=tuple(slow),
            hosts=roll.hosts_of(slow),
            figures=figures,
        )
    ]
