"""Weak and strong scaling: one recipe, trained for a few steps on 1, 2, 4 … devices of this machine.

Weak: every rank keeps the batch that one rank has, so perfect scaling is the same step time. Strong:
the global batch stays, so perfect scaling is an Nth of it. Each point is a run like any other, of
`muster train`'s own launcher and loop, and its ranks' timings show where the time went.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from muster import run_directory
from muster.bench import results
from muster.bench.files import Document
from muster.errors import LaunchError, MusterError
from muster.hardware import affinity, inventory, rehearsal
from muster.launch import local
from muster.observe.progress import Report, silent
from muster.observe.results import read_lines
from muster.parallel.layout import layout_for
from muster.recipe.batch import solve
from muster.recipe.describe import to_yaml
from muster.recipe.load import load
from muster.recipe.schema import Recipe

WARM_UP = 3  # steps that do not count
PARTS = {  # of a step: in a narrow column, and in words
    "compute": ("comp.", "computing"),
    "exposed": ("comm", "exposed communication"),
    "imbalance": ("skew", "waiting for slower ranks"),
    "data": ("data", "waiting for data"),
    "rest": ("rest", "optimizer and the rest"),
}
SHORT = (
    "training.epochs=null",
    "training.max_bad_steps=1",
    "checkpoint.every_steps=null",
    "checkpoint.final=false",
    "checkpoint.resume=auto",
    "evaluation.every_steps=null",
    "evaluation.final=false",
    "logging.to=[]",
)


def worlds(most: int) -> list[int]:
    """1, 2, 4 … and `most` itself."""
    return sorted({1 << power for power in range(most.bit_length())} | {most})


def most_ranks(asked: int | None) -> int:
    """All GPUs, or a rank per CPU core up to 8. More ranks than devices would only measure contention."""
    rehearsal.refuse("muster bench scaling")
    found = inventory.detect()
    ranks = found.rank_count(asked, cpu_ranks=min(found.cpus, 8))
    if not found.gpus and ranks > found.cpus:
        raise LaunchError(
            f"--gpus {asked}, but this machine offers {found.describe()}: each rank needs its own "
            f"core; ask for at most {found.cpus}"
        )
    return ranks


def measure(
    recipe: str,
    overrides: Sequence[str],
    most: int,
    kinds: Sequence[str],
    steps: int,
    folder: Path,
    say: Callable[[str], None] = lambda message: None,
    tell: Report = silent,
) -> Document:
    """Runs all points, one after another; their directories in `folder` are removed once read. `say` gets the
    result of each."""
    mine = Path(tempfile.mkdtemp(prefix="scaling-runs-", dir=folder))
    asked = [*overrides, *SHORT, f"training.steps={steps + WARM_UP}", f"logging.dir={mine}"]
    points = [(kind, ranks) for kind in kinds for ranks in worlds(most)]
    try:
        recipes = [_at(recipe, asked, kind, ranks) for kind, ranks in points]
    except MusterError:
        mine.rmdir()
        raise
    rows: list[Document] = []
    for (kind, ranks), resolved in zip(points, recipes, strict=True):
        tell(len(rows), len(points))
        row = next((r for r in rows if r["ranks"] == ranks == 1), None)
        if row is None:
            row = _point(resolved, ranks, most)
            say(f"{kind}, {ranks} rank(s): {row['samples_per_s']:.4g} samples/s")
        rows.append({**row, "kind": kind})
    shutil.rmtree(mine, ignore_errors=True)
    judge(rows)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    return {
        **results.document_head("scaling", device, most, [os.uname().nodename]),
        "recipe": load(recipe, overrides).name,
        "overrides": list(overrides),
        "method": {
            "steps": steps,
            "warm_up_steps": WARM_UP,
            "statistic": "mean of the middle half of steps by time",
        },
        "keys": ["kind", "ranks"],
        "figure": "efficiency",
        "better": "higher",
        "rows": rows,
    }


def judge(rows: list[Document]) -> None:
    """Adds to each row its speed-up, its efficiency, and where the time beyond perfect scaling went:
    `lost`, in seconds a step, adds up to the step time less the perfect one."""
    for row in rows:
        one = next(r for r in rows if r["ranks"] == 1 and r["kind"] == row["kind"])
        share = row["batch"] / (row["ranks"] * one["batch"])
        row["speedup"] = row["samples_per_s"] / one["samples_per_s"]
        row["efficiency"] = row["speedup"] / row["ranks"]
        row["lost"] = {part: row["parts"][part] - share * one["parts"][part] for part in PARTS}


def _at(recipe: str, overrides: Sequence[str], kind: str, ranks: int) -> Recipe:
    """The recipe of one point, refused before any of them runs where it cannot."""
    batch = load(recipe, overrides).training.global_batch_size * (ranks if kind == "weak" else 1)
    sizes = [f"training.global_batch_size={batch}", "training.scale_with_ranks=none"]
    resolved = load(recipe, [*overrides, *sizes])
    solve(resolved.training, layout_for(resolved.distributed, ranks).data_ranks)
    return resolved


def _point(recipe: Recipe, ranks: int, most: int) -> Document:
    run = _train(recipe, ranks, most)
    row = {
        "ranks": ranks,
        "batch": recipe.training.global_batch_size,
        "strategy": (run.results() or {})["strategy"],
        **read_run(run.path),
    }
    shutil.rmtree(run.path)
    return row


def _train(recipe: Recipe, ranks: int, most: int) -> run_directory.Run:
    run = run_directory.create(
        Path(recipe.logging.dir), recipe.name, {"recipe.yaml": to_yaml(recipe)}
    )
    with _cores(ranks, most):
        process = local.start(run, ranks)
    try:
        code = process.wait()
    except BaseException:
        run_directory.stop(run, 5.0, now=True)
        raise
    if code or not run.results():
        failure = run.info().get("failure") or {}
        message = failure.get("what") or "it wrote no results"
        raise LaunchError(f"the run on {ranks} rank(s) failed: {message}; see {run.path}")
    return run


@contextmanager
def _cores(ranks: int, most: int) -> Iterator[None]:
    """CPU ranks get the cores that they have when `most` run: one rank with the whole processor to
    itself would be another device. What starts in here inherits them."""
    found, before = inventory.detect(), os.sched_getaffinity(0)
    if not found.gpus:
        shares = [affinity.cores_for(rank, most, found) for rank in range(ranks)]
        os.sched_setaffinity(0, set().union(*shares) or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def read_run(folder: Path) -> Document:
    """Throughput and the parts of a step, in seconds, from the files of a run's ranks."""
    metrics = read_lines(folder / "metrics.jsonl")
    files = sorted((folder / "ranks").glob("*.jsonl"))
    by_step = list(zip(*(read_lines(file) for file in files), strict=True))
    steps = sorted(
        zip(metrics[WARM_UP:], by_step[WARM_UP:], strict=True),
        key=lambda step: step[0]["step_time_s"],
    )
    quarter = len(steps) // 4
    middle = steps[quarter : len(steps) - quarter]
    sums = dict.fromkeys(PARTS, 0.0)
    seconds = 0.0
    for _, ranks in middle:
        for part, value in step_parts(ranks).items():
            sums[part] += value
        seconds += _mean([rank["step_time_s"] for rank in ranks])
    return {
        "samples_per_s": sum(line["samples"] for line, _ in middle) / seconds,
        "step_s": seconds / len(middle),
        "parts": {part: value / len(middle) for part, value in sums.items()},
    }


def step_parts(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """One step, as a mean over ranks; the parts add up to it. A rank that waits for one that computed,
    or waited for data, longer is out of balance; what it waits beyond that is communication that
    computing does not hide."""
    busy = [rank["compute_s"] + rank["data_wait_s"] for rank in ranks]
    waiting = _mean([rank["comm_wait_s"] for rank in ranks])
    imbalance = min(waiting, max(busy) - _mean(busy))
    compute = _mean([rank["compute_s"] for rank in ranks])
    data = _mean([rank["data_wait_s"] for rank in ranks])
    total = _mean([rank["step_time_s"] for rank in ranks])
    return {
        "compute": compute,
        "exposed": waiting - imbalance,
        "imbalance": imbalance,
        "data": data,
        "rest": total - compute - waiting - data,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
