"""Training inside a pool of ranks: the worker's own steps, on a recipe made small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import few_clips
from muster import run_directory
from muster.observe.results import read_lines
from muster.parallel.mesh import Mesh
from muster.recipe.load import load
from muster.training.job import Job
from muster.training.loop import train
from muster.worker.prepare import prepare

SMALL = ["logging.to=[]", "evaluation.every_steps=null", "checkpoint.every_steps=null"]
SPEECH = ("speech", "speech-streaming", "whisper-micro")


def make_job(mesh: Mesh, folder: str, overrides: list[str], recipe: str = "speech") -> Job:
    few = [f"data.train={few_clips.folder()}", "training.global_batch_size=8"]
    loaded = load(recipe, [*SMALL, *(few if recipe in SPEECH else ()), *overrides])
    run = run_directory.Run(Path(folder))
    if mesh.first:
        (run.path / "ranks").mkdir(parents=True, exist_ok=True)
    mesh.barrier()
    return prepare(loaded, mesh, run)


def run_training(
    mesh: Mesh, folder: str, overrides: list[str], recipe: str = "speech"
) -> list[dict[str, Any]]:
    """Train to the end; the lines of metrics.jsonl."""
    job = make_job(mesh, folder, overrides, recipe)
    train(job)
    job.observer.close()
    mesh.barrier()
    return read_lines(Path(folder) / "metrics.jsonl")


def weights(job: Job) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for part in job.engine.parts for p in part.parameters()])
