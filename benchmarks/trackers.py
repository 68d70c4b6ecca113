"""What trackers cost a step: the training thread's time, and the CPU time of the threads that call them.

    python benchmarks/trackers.py tensorboard wandb mlflow trackio

Both as ratios to what the training thread needs to write the step's lines into the run directory, which is
also printed, in microseconds of this machine's CPU. Set WANDB_MODE=offline without an account.
"""

from __future__ import annotations

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


def cost(name: str | None) -> tuple[float, float]:
    """Microseconds per step: of the training thread, and of all other threads."""
    folder = Path(tempfile.mkdtemp(prefix="trackers-")) / "run"
    folder.mkdir()
    trackers = Trackers([name] if name else [], folder, {"name": "benchmark"}, 0)
    while name and not (folder / "trackers.json").exists():
        time.sleep(0.1)  # until it has started
    observer = Observer(folder, 0, every_steps=10, start=0, trackers=trackers)
    whole, own = time.process_time(), time.thread_time()
    for step in range(1, STEPS + 1):
        observer.write(record(step))
    own = time.thread_time() - own
    observer.end_trackers("finished")
    others = time.process_time() - whole - own
    observer.close()
    return own / STEPS * 1e6, others / STEPS * 1e6


def main() -> None:
    base, _ = cost(None)
    print(f"the lines of a step in the run directory: {base:.0f} µs of the training thread")
    for name in sys.argv[1:]:
        own, others = cost(name)
        print(
            f"{name}: training thread {own / base:.2f}, the tracker's thread {others / base:.1f} times that"
        )


if __name__ == "__main__":
    main()
