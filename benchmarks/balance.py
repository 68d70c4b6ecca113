"""How equal the ranks' work is, and how much of it is padding: muster's plan and DistributedSampler.

    python benchmarks/balance.py --data /data/librispeech      # a long-tailed set is always there
    python benchmarks/balance.py --buckets 12

Nothing is trained: batches are planned from the clips' durations, for 8 ranks. A micro-batch costs
rows × window. muster pads every clip of a global batch to one window, its longest clip rounded up to
one of a few lengths, so that the loss does not depend on the layout; under DistributedSampler each
rank pads to its own longest clip. "balance" is the mean over steps of the slowest rank's cost ÷ the
mean cost, "quadratic" the same for a cost of rows × window², as attention has; "padding" is the
share of all cells that hold no sound. "100 rows": the corpus is gone through by row groups of so
many, as one larger than memory is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler

from muster.data import corpus
from muster.data.batches import BatchPlan, cut
from muster.data.speech.files import AudioFiles
from muster.data.speech.windows import choose_lengths, round_up

Seconds = NDArray[np.float64]
Step = list[tuple[int, float, float]]  # of each rank: rows, window, seconds of sound
RANKS = 8
BATCHES = (16, 32, 64, 128, 256)
ROW_GROUPS = (100, 1000)
BUCKETS = 16


@dataclass(frozen=True)
class Shares:
    balance: float
    quadratic: float
    padding: float


def long_tailed(clips: int = 20_000) -> Seconds:
    """Seconds: most clips of a few, some of up to thirty."""
    drawn = np.random.default_rng(0).lognormal(mean=1.6, sigma=0.6, size=clips)
    return drawn.clip(1.0, 30.0)


def planned(
    seconds: Seconds, batch: int, buckets: int, epochs: int = 2, rows: int | None = None
) -> Iterator[Step]:
    """`rows` is the size of the row groups, where the corpus is gone through by them."""
    windows = round_up(seconds, choose_lengths(seconds, buckets))
    groups = None if rows is None else np.arange(len(seconds)) // rows
    plan = BatchPlan(seconds, batch, seed=0, groups=groups, windows=windows)
    for step in range(epochs * plan.steps_per_epoch):
        ids = plan.batch(step)
        window = float(windows[ids].max())
        dealt = cut(ids, seconds, RANKS, accumulation=1)
        yield [(len(mine), window, float(seconds[mine].sum())) for (mine,) in dealt]


def sampled(seconds: Seconds, batch: int, epochs: int = 2) -> Iterator[Step]:
    rows = batch // RANKS
    samplers = [
        DistributedSampler(seconds, RANKS, rank, seed=0, drop_last=True) for rank in range(RANKS)
    ]
    for epoch in range(epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        orders = [np.array(list(sampler)) for sampler in samplers]
        for start in range(0, len(orders[0]) - rows + 1, rows):
            mine = [seconds[order[start : start + rows]] for order in orders]
            yield [(rows, float(part.max()), float(part.sum())) for part in mine]


def measure(steps: Iterator[Step]) -> Shares:
    linear, quadratic, filled, cells = [], [], 0.0, 0.0
    for step in steps:
        cost = np.array([rows * window for rows, window, _ in step])
        squared = np.array([rows * window**2 for rows, window, _ in step])
        linear.append(cost.max() / cost.mean())
        quadratic.append(squared.max() / squared.mean())
        filled += sum(sound for *_, sound in step)
        cells += float(cost.sum())
    return Shares(float(np.mean(linear)), float(np.mean(quadratic)), 1 - filled / cells)


def durations(spec: str) -> Seconds:
    rows = AudioFiles(corpus.files(spec, "--data", "train")).read_rows()
    return rows.seconds[rows.seconds > 0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="a corpus to measure too, as data.train names one")
    parser.add_argument("--buckets", type=int, default=BUCKETS, help="window lengths")
    options = parser.parse_args()
    sets = {"long-tailed": long_tailed()}
    if options.data:
        sets[Path(options.data).name] = durations(options.data)
    print(f"{RANKS} ranks, {options.buckets} window lengths")
    print(
        f"{'clips':>24} {'batch':>5}  {'plan':<18} {'balance':>7} {'quadratic':>9} {'padding':>7}"
    )
    for name, seconds in sets.items():
        for batch in (size for size in BATCHES if size <= len(seconds)):
            found = {
                "muster": measure(planned(seconds, batch, options.buckets)),
                "DistributedSampler": measure(sampled(seconds, batch)),
            }
            for rows in (size for size in ROW_GROUPS if size < len(seconds)):
                steps = planned(seconds, batch, options.buckets, rows=rows)
                found[f"muster, {rows} rows"] = measure(steps)
            for plan, shares in found.items():
                print(
                    f"{f'{name} ({len(seconds)})':>24} {batch:>5}  {plan:<18} {shares.balance:7.3f} "
                    f"{shares.quadratic:9.3f} {shares.padding:7.1%}"
                )


if __name__ == "__main__":
    main()
