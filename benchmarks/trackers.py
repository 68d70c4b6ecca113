"""What trackers cost a step: the training thread's time, and the CPU time of the threads that call them.

    python benchmarks/trackers.py tensorboard wandb mlflow trackio

Both as ratios to the CPU time in which the training thread writes the step's lines into the run directory. Set WANDB_MODE=offline without an account.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from muster.observe.observer import Observer, StepRecord
from muster.observe.trackers import Trackers

STEPS = 3000
AMOUNTS = {"tokens": 4096.0}


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step, epoch=0, loss=2.5, grad_norm=0.7, lr=1e-3, samples=32, step_time_s=0.5,
        data_wait_s=0.01, comm_wait_s=0.1, compute_s=0.3, filled=90, cells=100, amounts=AMOUNTS,
        skipped=False,
    )  # fmt: skip


def cost(name: str) -> tuple[float, float, float]:
    """Microseconds per step: of the training thread to write the lines and to hand them to the tracker, and of
    all other threads."""
    folder = Path(tempfile.mkdtemp(prefix="trackers-")) / "run"
    folder.mkdir()
    trackers = Trackers([name], folder, {"name": "benchmark"}, 0)
    while not (folder / "trackers.json").exists():
        time.sleep(0.1)  # until it has started
    observer = Observer(folder, 0, every_steps=10, start=0)
    lines, handing = [], []
    whole, begin = time.process_time(), time.thread_time()
    for step in range(1, STEPS + 1):
        done, before = record(step), time.thread_time()
        observer.write(done)
        line, written = done.metrics(), time.thread_time()
        trackers.metrics(step, "train", line)
        lines.append(written - before)
        handing.append(time.thread_time() - written)
    own = time.thread_time() - begin
    trackers.close()
    others = time.process_time() - whole - own
    observer.close()
    return statistics.median(lines) * 1e6, statistics.median(handing) * 1e6, others / STEPS * 1e6


def main() -> None:
    for name in sys.argv[1:]:
        lines, handing, others = cost(name)
        print(
            f"{name}: the training thread {handing / lines:.2f}, the tracker's thread {others / lines:.1f} times "
            f"the lines of a step ({lines:.0f} µs)"
        )


if __name__ == "__main__":
    main()
