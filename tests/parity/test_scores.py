"""A score is the same number whatever layout computes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.checks.parity import short_recipe
from muster.recipe.load import load
from parity.table import RECIPES, overrides_for

LAYOUTS = {
    "ddp 2": (2, ["distributed.strategy=ddp"]),
    "fsdp 2": (2, ["distributed.strategy=fsdp"]),
    "fsdp 4": (4, ["distributed.strategy=fsdp"]),
    "zero3 2": (2, ["distributed.strategy=zero3"]),
    "context 2": (2, ["distributed.strategy=context"]),
    "context 4": (4, ["distributed.strategy=fsdp", "distributed.context=2"]),
    "tensor 2": (2, ["distributed.strategy=tensor"]),
    "pipeline 2": (2, ["distributed.strategy=pipeline"]),
    "tensor 2 × pipeline 2": (
        4,
        ["distributed.strategy=hybrid", "distributed.tensor=2", "distributed.pipeline=2"],
    ),
    "pipeline 2 × fsdp 2": (4, ["distributed.strategy=hybrid", "distributed.pipeline=2"]),
}


@pytest.fixture(scope="module")
def split_corpus(tmp_path_factory) -> str:
    """Training text, and 65 sequences of validation text: some ranks have a batch more than others."""
    import argparse
    import textwrap

    folder = tmp_path_factory.mktemp("split")
    (folder / "train.txt").write_text(Path(str(argparse.__file__)).read_text())
    (folder / "validation.txt").write_text(Path(str(textwrap.__file__)).read_text()[:1555])
    return str(folder)


def score(
    mesh, folder: str, model: str, corpus: str, options: list[str]
) -> tuple[dict[str, float], list[str]]:
    """The scores of the validation split, and the hypotheses that were worst."""
    from contextlib import nullcontext

    from muster import run_directory
    from muster.models.whisper import model as whisper
    from muster.training.evaluate import evaluate
    from muster.worker.prepare import prepare

    recipe = load(RECIPES[model], short_recipe([*overrides_for(model, corpus), *options]))
    Path(folder, "ranks").mkdir(parents=True, exist_ok=True)
    usual, whisper.initial_std = whisper.initial_std, lambda *key: 3 * (usual(*key) or 0) or None
    try:  # so large that what is heard matters from the start
        job = prepare(recipe, mesh, run_directory.Run(Path(folder)))
    finally:
        whisper.initial_std = usual
    found = evaluate(job.task, job.engine, "validation", job.mesh, 4, nullcontext)
    job.observer.close()
    return found.scores, [example.hypothesis for example in found.worst]


FULL = ("ddp 2", "fsdp 4", "context 4", "tensor 2", "tensor 2 × pipeline 2", "pipeline 2 × fsdp 2")


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=pytest.mark.full if n in FULL else ()) for n in LAYOUTS]
)
def test_perplexity_is_that_of_one_process(ranks, split_corpus, tmp_path, layout):
    alone, _ = ranks(1)(score, str(tmp_path / "alone"), "gpt", split_corpus, [])[0]
    world, options = LAYOUTS[layout]
    together = ranks(world)(score, str(tmp_path / "together"), "gpt", split_corpus, options)
    assert alone["bytes"] == 1555
    for scores, _ in together:
        assert scores["tokens"] == alone["tokens"]
        assert scores["bytes"] == alone["bytes"]
        assert scores["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-6)
        assert scores["bits_per_byte"] == pytest.approx(alone["bits_per_byte"], rel=1e-6)


WHISPER = ["evaluation.max_tokens=6", "seed=3"]


@pytest.mark.parametrize(
    ("decoder", "layout"),
    [
        ("greedy", "fsdp 2"),
        pytest.param("greedy", "fsdp 4", marks=pytest.mark.full),
        pytest.param("beam", "ddp 2", marks=pytest.mark.full),
        pytest.param("greedy", "ddp 2", marks=pytest.mark.full),
        pytest.param("greedy", "zero3 2", marks=pytest.mark.full),
        pytest.param("beam", "zero3 2", marks=pytest.mark.full),
        pytest.param("beam", "fsdp 4", marks=pytest.mark.full),
        ("beam", "pipeline 2"),
        pytest.param("greedy", "pipeline 2", marks=pytest.mark.full),
        pytest.param("beam", "tensor 2", marks=pytest.mark.full),
        pytest.param("beam", "tensor 2 × pipeline 2", marks=pytest.mark.full),
        pytest.param("beam", "pipeline 2 × fsdp 2", marks=pytest.mark.full),
    ],
)
def test_what_whisper_hears_is_what_one_process_hears(ranks, tmp_path, layout, decoder):
    """Word for word, under layouts whose every step of the search takes all ranks."""
    model = "whisper-heads" if "tensor" in layout else "whisper"
    common = [*WHISPER, f"evaluation.decoder={decoder}"]
    alone = ranks(1)(score, str(tmp_path / "alone"), model, "", common)[0]
    world, options = LAYOUTS[layout]
    for found in ranks(world)(score, str(tmp_path / "together"), model, "", common + options):
        assert found == alone
    assert len(set(alone[1])) > 1
