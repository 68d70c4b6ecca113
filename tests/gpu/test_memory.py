"""Memory of ranks that share a GPU: one that runs out, and the plan held against what is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from muster import run_directory
from muster.training.loop import train
from pool import RankPool
from processes import muster, python_path
from training import make_job

pytestmark = pytest.mark.gpu
# Rank 1 gets so little memory that its half of the batch does not fit.
TIGHT = """
import os
if os.environ.get("RANK") == "1":
    import torch
    real = torch.cuda.set_per_process_memory_fraction
    def tight(fraction, device=None):
        real(min(fraction, 3 * 2**27 / torch.cuda.get_device_properties(device).total_memory), device)
    torch.cuda.set_per_process_memory_fraction = tight
"""


@pytest.mark.parametrize("shrinks", [True, False])
def test_one_rank_runs_out_of_memory(recipe, tmp_path, shrinks):
    (tmp_path / "sitecustomize.py").write_text(TIGHT)
    words = ["training.global_batch_size=64", "data.sequence_length=256", "training.steps=4"]
    words += ["training.on_oom=shrink"] if shrinks else []
    words += [
        "distributed.strategy=ddp",
        "training.precision=fp32",
        "--gpus",
        "2",
        "--run",
        "tight",
    ]
    env, code = python_path(tmp_path), 0 if shrinks else 1
    muster("train", recipe, *words, folder=tmp_path, env=env, code=code)
    run = run_directory.find("tight", tmp_path / "runs")
    if shrinks:
        results = run.results()
        assert results
        assert results["shrunk"]
        assert "on rank 1" in results["shrunk"][0]
        assert results["steps"] == 4
    else:
        failure = json.dumps(run.info()["failure"])
        assert "rank 1 ran out of memory" in failure
        assert "its share of the GPU in this rehearsal" in failure


LAYOUTS = {
    "fsdp 4": (4, "fsdp"),
    "tensor 2": (2, "tensor"),
    "pipeline 2 × fsdp 2": (4, "hybrid", "distributed.pipeline=2"),
}
SIZES = ["training.steps=3", "training.global_batch_size=16", "data.sequence_length=256"]
SIZES += [
    "training.precision=fp32",
    "training.compile=false",
    "evaluation.final=false",
    "checkpoint.final=false",
]


def measure(mesh, folder: str, options: list[str]) -> tuple[float, float]:
    """GiB of this rank at its peak, and of the rank that needs most by the plan."""
    job = make_job(mesh, folder, [*SIZES, *options], "gpt2")
    train(job)
    job.observer.close()
    mesh.barrier()
    planned = json.loads(Path(folder, "plan.json").read_text())
    return torch.cuda.max_memory_allocated() / 2**30, planned["memory_gib"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_takes_what_was_planned(tmp_path, record_property, layout):
    """In processes of its own: nothing of another engine is left there."""
    world, strategy, *options = LAYOUTS[layout]
    pool = RankPool(world)
    try:
        found = pool(measure, str(tmp_path), [f"distributed.strategy={strategy}", *options])
    finally:
        pool.close()
    measured, planned = max(peak for peak, _ in found), found[0][1]
    record_property(
        "row", f"| {layout} | {planned:.2f} | {measured:.2f} | {measured / planned:.3f}"
    )
    assert measured == pytest.approx(planned, rel=0.05)
