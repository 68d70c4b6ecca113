"""CUDA graphs: replayed work gives the course of work done anew."""

from __future__ import annotations

import json

import pytest

from muster.errors import RecipeError
from muster.parallel.conflicts import refuse_conflicts
from muster.parallel.layout import Layout
from muster.recipe.load import load

COMMON = [
    "training.steps=12",
    "training.warmup_steps=0",
    "training.lr=3e-4",
    "training.precision=fp32",
    "training.cuda_graphs=true",
    "evaluation.every_steps=null",
    "evaluation.final=false",
    "checkpoint.every_steps=null",
    "logging.to=[]",
]


def course(folder, recipe: str, overrides: list[str]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, on the GPU."""
    from muster import run_directory
    from muster.parallel import mesh as meshes
    from muster.training.loop import train
    from muster.worker.prepare import prepare

    mesh = meshes.join(0, 0, Layout(), "cuda", 60.0)
    try:
        job = prepare(
            load(recipe, [*COMMON, *overrides]), mesh, run_directory.create(folder, "run", {})
        )
        train(job)
        graphs = job.engine.graphs  # type: ignore[attr-defined]
        assert graphs is None or graphs.captured
        job.observer.close()
    finally:
        meshes.leave()
    lines = next(folder.rglob("metrics.jsonl")).read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    return [(s["loss"], s["grad_norm"]) for s in steps if "grad_norm" in s]


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("whisper-micro", ["data.window=bucket", "data.buckets=3", "model.dropout=0.1"]),
        ("whisper-micro", ["training.compile=true", "data.window=bucket", "data.buckets=3"]),
        ("gpt-micro", ["training.compile=true"]),
    ],
)
def test_replayed_steps_take_the_course_of_plain_ones(tmp_path, recipe, options, accumulation):
    sizes = ["training.global_batch_size=8", f"training.per_device_batch_size={8 // accumulation}"]
    replayed = course(tmp_path / "graphs", recipe, [*options, *sizes])
    plain = course(tmp_path / "plain", recipe, [*options, *sizes, "training.cuda_graphs=false"])
    assert len(replayed) == 12
    for ours, theirs in zip(replayed, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4)


@pytest.mark.parametrize(
    ("layout", "override", "said"),
    [
        (Layout(shard=2), "seed=1", "one GPU or under DDP, and this is"),
        (Layout(zero=2), "seed=1", "one GPU or under DDP, and this is"),
        (
            Layout(),
            "training.activation_checkpointing=full",
            "activation checkpointing cannot be captured",
        ),
        (Layout(), "task=speech-ctc", "speech-ctc synchronizes with the GPU"),
    ],
)
def test_what_cannot_be_recorded_is_refused(layout, override, said):
    name = "speech" if "ctc" in override else "whisper-micro"
    recipe = load(name, ["training.cuda_graphs=true", override])
    with pytest.raises(RecipeError, match=rf"training\.cuda_graphs: .*{said}"):
        refuse_conflicts(recipe, layout)
