"""From the command to the first completed step: `muster train` beside plain torchrun.

    python benchmarks/startup.py --rounds 5
    python benchmarks/startup.py --recipe speech --ranks 4

Both start the very same worker on an equal run directory, turn by turn, after one round that does not
count. What muster does more: it reads the recipe and looks at the machine before anything starts, and
its supervisor, unlike torchrun, outlives the terminal. The quickest round of each side counts, since
whatever else the machine does only adds to a start; the difference may be 1 s at most, and with more the
exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from muster import run_directory
from muster.recipe.describe import to_yaml
from muster.recipe.load import load

LIMIT_S = 1.0
PATIENCE_S = 300.0
ONE_STEP = [
    "training.steps=1",
    "training.epochs=null",
    "evaluation.every_steps=null",
    "evaluation.final=false",
    "checkpoint.every_steps=null",
]


def with_muster(recipe: str, ranks: int, root: Path, turn: int) -> float:
    name = f"muster-{turn}"
    words = [recipe, *ONE_STEP, f"logging.dir={root}", "--gpus", str(ranks), "--run", name]
    return seconds([sys.executable, "-m", "muster", "train", *words], root / name)


def with_torchrun(recipe: str, ranks: int, root: Path, turn: int) -> float:
    resolved = load(recipe, [*ONE_STEP, f"logging.dir={root}"])
    run = run_directory.create(root, f"torchrun-{turn}", {"recipe.yaml": to_yaml(resolved)})
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return seconds([sys.executable, *torchrun, "-m", "muster.worker", str(run.path)], run.path)


def seconds(command: Sequence[str], folder: Path) -> float:
    """Until the first step stands in the run's metrics. The run is left to end by itself."""
    metrics = folder / "metrics.jsonl"
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while not (metrics.exists() and metrics.stat().st_size):
        if process.poll() or time.perf_counter() - began > PATIENCE_S:
            process.kill()
            _, words = process.communicate()
            sys.exit(f"{' '.join(command)} made no step:\n{words.decode()[-2000:]}")
        time.sleep(0.005)
    took = time.perf_counter() - began
    process.communicate()
    return took


SIDES = {"torchrun": with_torchrun, "muster": with_muster}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default="digits", help="shipped, or a file")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores // asked.ranks))  # the same for both
    took: dict[str, list[float]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(asked.rounds + 1):
            for name, start in SIDES.items():
                took[name].append(start(asked.recipe, asked.ranks, Path(folder), turn))
    least = {name: min(times[1:]) for name, times in took.items()}
    middle = {name: statistics.median(times[1:]) for name, times in took.items()}
    more = least["muster"] - least["torchrun"]
    print(
        f"{asked.recipe}, {asked.ranks} ranks, to the first completed step, {asked.rounds} rounds:"
    )
    print(f"muster takes {least['muster'] / least['torchrun']:.2f} × torchrun's time")
    print(
        f"{more:+.2f} s, of {LIMIT_S:.0f} s allowed; medians differ by "
        f"{middle['muster'] - middle['torchrun']:+.2f} s"
    )
    sys.exit(more > LIMIT_S)


if __name__ == "__main__":
    main()
