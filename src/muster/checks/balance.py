"""Step 7: the same matrix work on every rank at once; the slowest against the median."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import torch

from muster.checks.context import RankContext, RankReport
from muster.checks.findings import SLOW, TOO_SLOW, Finding, RankNames, Status

WINDOWS = 8
WINDOW_S = 0.2  # many scheduler time slices: a shared core is shared in every window


def measure(context: RankContext) -> RankReport:
    """TFLOP/s of the best window, so that a short disturbance does not count."""
    mesh = context.mesh
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

    work(WINDOW_S)  # warm-up: clocks, caches, kernels
    mesh.barrier()
    return {"tflops": max(work(WINDOW_S) for _ in range(WINDOWS)), "gpu": gpu}


def judge(reports: Mapping[int, RankReport], rank_names: RankNames) -> list[Finding]:
    speeds = {rank: reports[rank]["tflops"] for rank in sorted(reports)}
    usual = statistics.median_high(speeds.values())
    slowest = min(speeds, key=lambda rank: speeds[rank])
    ratio = usual / speeds[slowest]
    figures = {"slowest_over_median": ratio, "median_tflops": usual}
    if ratio <= SLOW:
        message = f"slowest rank {ratio:.2f} × the median time ({usual:.3g} TFLOP/s)"
        return [Finding("balance", "ok", message, figures=figures)]
    slow = [rank for rank in speeds if usual / speeds[rank] > SLOW]
    status: Status = "fail" if ratio > TOO_SLOW else "warn"
    gpu = reports[slowest]["gpu"]
    return [
        Finding(
            "balance",
            status,
            f"{rank_names.names(slow)}: the same work takes {ratio:.2f} × the median time, and in "
            "training all other ranks wait for it",
            cause="a throttled or shared GPU, or a slower GPU model than the others"
            if gpu
            else "another process on the same cores, fewer cores than the others, or a throttled CPU",
            cure="see `nvidia-smi -q -d PERFORMANCE` and the processes on it; cool it, or leave it out "
            "with CUDA_VISIBLE_DEVICES"
            if gpu
            else "look at `top` there, end what competes, and give every rank as many cores",
            ranks=tuple(slow),
            hosts=rank_names.hosts_of(slow),
            figures=figures,
        )
    ]
