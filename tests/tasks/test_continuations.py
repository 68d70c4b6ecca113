"""What a language model of plain text writes at the end of its training."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

import muster
from muster import run_directory
from muster.page.build import read_document
from muster.training.loop import train
from muster.worker.results import finish
from training import make_job

TOKENS = 9


def train_to_the_end(mesh: Any, folder: str, words: list[str]) -> dict[str, Any]:
    job, run = make_job(mesh, folder, words, "gpt-micro"), run_directory.Run(Path(folder))
    if mesh.first:
        run.update(created=0.0)
    results = finish(job, run, train(job))
    job.observer.close()
    return results


def words(folder: Path, *more: str) -> list[str]:
    text = Path(str(textwrap.__file__)).read_text()
    (folder / "train.txt").write_text(text)
    (folder / "validation.txt").write_text(text[:900])
    return [
        f"data.train={folder / 'train.txt'}",
        f"data.validation={folder / 'validation.txt'}",
        "data.test=null",
        "data.sequence_length=64",
        "training.steps=3",
        "training.epochs=null",
        "training.global_batch_size=4",
        "training.precision=fp32",
        "checkpoint.every_steps=3",
        "evaluation.every_steps=null",
        "evaluation.answers=2",
        f"evaluation.answer_tokens={TOKENS}",
        *more,
    ]


@pytest.mark.guides
def test_continuations_in_the_results_are_what_generate_says(ranks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    asked = words(tmp_path, "distributed.strategy=fsdp")
    results = ranks(2)(train_to_the_end, str(run), asked)[0]
    assert [found["step"] for found in results["continuations"]] == [3, 3]
    model, text = muster.load(run), (tmp_path / "validation.txt").read_text()
    for found in results["continuations"]:
        assert found["prompt"] + found["expected"] in text
        told = model.generate(found["prompt"], max_tokens=TOKENS, temperature=0)
        assert found["text"].rstrip("\ufffd") == told.rstrip("\ufffd")
    shown = read_document(run)["examples"]["generated"]
    assert [one["text"] for one in shown] == [found["text"] for found in results["continuations"]]


def test_none_are_made_where_none_are_wanted(ranks, tmp_path: Path) -> None:
    asked = words(tmp_path, "evaluation.answers=0", "training.steps=1")
    assert ranks(1)(train_to_the_end, str(tmp_path / "run"), asked)[0]["continuations"] == []
