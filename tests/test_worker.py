"""One rank's life, as far as the pool of ranks can live it."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from muster import run_directory
from muster.observe.results import read_lines
from muster.training.loop import train
from muster.worker.results import finish
from training import make_job

CLIPS, BROKEN = 12, (1, 4, 5, 8, 11)


@pytest.fixture(scope="module")
def half_broken(tmp_path_factory) -> Path:
    """Clips of which some have a sound header and half a body."""
    rng, cells = np.random.default_rng(0), []
    for number in range(CLIPS):
        file = io.BytesIO()
        soundfile.write(file, rng.normal(0, 0.1, 8000 + 400 * number), 16000, format="FLAC")
        whole = file.getvalue()
        cells.append({"bytes": whole[: len(whole) // 2] if number in BROKEN else whole})
    audio = pa.array(cells, pa.struct([("bytes", pa.binary())]))
    folder = tmp_path_factory.mktemp("clips")
    pq.write_table(pa.table({"audio": audio, "text": ["a"] * CLIPS}), folder / "train.parquet")
    return folder


def train_and_finish(mesh, folder: str, overrides: list[str]):
    """The samples that this rank met broken, and the results."""
    job, run = make_job(mesh, folder, overrides), run_directory.Run(Path(folder))
    if mesh.first:
        run.update(created=time.time())
    done = train(job)
    met = sorted(job.loader.source.broken)
    return met, finish(job, run, done)


def agree(mesh, folder: str, lr: list[float], shown: list[bool]) -> str:
    """Rank 1 may have another learning rate, or not see the run directory."""
    from muster.errors import LaunchError
    from muster.recipe.load import load
    from muster.worker.main import _check_agreement

    path = Path(folder) if shown[mesh.rank] else Path(folder, "elsewhere")
    try:
        _check_agreement(load("gpt-micro", [f"training.lr={lr[mesh.rank]}"]), path, mesh)
    except LaunchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("lr", "shown", "words"),
    [
        ([1e-3, 1e-3], [True, True], ""),
        ([1e-3, 2e-3], [True, True], "rank 1 has another recipe than rank 0"),
        ([1e-3, 1e-3], [True, False], "does not exist on "),
    ],
)
def test_ranks_agree_on_recipe_and_run_directory_or_none_trains(ranks, tmp_path, lr, shown, words):
    (tmp_path / "run.json").write_text("{}")
    for said in ranks(2)(agree, str(tmp_path), lr, shown):
        assert (words in said) if words else not said


@pytest.mark.parametrize("kept_gib", [0, 1])
def test_results_count_each_clip_that_broke_on_any_rank_once(
    ranks, half_broken, tmp_path, kept_gib
):
    """Where clips are kept, every rank decodes all of them; else each its own alone."""
    overrides = [
        f"data.train={half_broken}",
        f"data.cache_gib={kept_gib}",
        "data.max_bad_fraction=0.5",
        "training.global_batch_size=6",
        "training.steps=2",
        "evaluation.final=false",
    ]
    (first, results), (second, nothing) = ranks(2)(train_and_finish, str(tmp_path), overrides)
    assert {*first, *second} == set(BROKEN)
    if kept_gib:
        assert first == second
    else:
        assert not {*first} & {*second}
        assert first
        assert second
    assert results["left_out"] == {"broken while training": len(BROKEN)}
    assert run_directory.Run(tmp_path).results() == results
    _check_account(tmp_path)
    assert nothing == {}


def _check_account(run: Path) -> None:
    """data.json, and its lines before the first step."""
    train = json.loads((run / "data.json").read_text())["splits"]["train"]
    assert (train["samples"], train["files"]) == (CLIPS, 1)
    assert (train["by_file"][0]["count"], train["by_file"][0]["unit"]) == (CLIPS, "clips")
    data, started = read_lines(run / "events.jsonl")[:2]
    assert (data["event"], started["event"]) == ("data", "started")
    assert data["lines"][0].startswith(f"train: {CLIPS} samples, 0.00 hours in 1 file(s)")


def test_a_score_says_how_many_clips_broke_on_any_rank(ranks, half_broken, tmp_path):
    overrides = [
        f"data.train={half_broken}",
        f"data.test={half_broken / 'train.parquet'}",
        "data.cache_gib=0",
        "data.max_bad_fraction=0.5",
        "training.global_batch_size=6",
        "training.steps=1",
        "evaluation.final=true",
        "evaluation.batch_size=2",
    ]
    (_, results), _ = ranks(2)(train_and_finish, str(tmp_path), overrides)
    assert results["scored"] == "test"
    assert results["not_scored"] == {"broken while training": len(BROKEN)}


@pytest.mark.parametrize(("every", "saved"), [("null", None), ("2", "step-2")])
def test_results_name_the_newest_checkpoint_if_there_is_one(ranks, tmp_path, every, saved):
    overrides = ["training.steps=3", "checkpoint.final=false", f"checkpoint.every_steps={every}"]
    overrides += ["evaluation.final=false"]
    [(_, results)] = ranks(1)(train_and_finish, str(tmp_path), overrides)
    found = results["checkpoint"]
    assert (found and Path(found).name) == saved
    assert results["measured"]["saves"] == len(list((tmp_path / "checkpoints").glob("step-*")))
