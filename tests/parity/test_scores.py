"""A score is the same number whatever layout computes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.check.parity import short_recipe
from muster.recipe.load import load
from parity.table import RECIPES, overrides_for

LAYOUTS = {
    "ddp 2": (2, ["distributed.strategy=ddp"]),
    "fsdp 4": (4, ["distributed.strategy=fsdp"]),
    "zero3 2": (2, ["distributed.strategy=zero3"]),
    "tensor 2": (2, ["distributed.strategy=tensor"]),
    "interleaved 2": (
        2,
        ["distributed.strategy=pipeline", "distributed.pipeline_options.schedule=interleaved"],
    ),
    "tensor 2 × pipeline 2": (
        4,
        ["distributed.strategy=hybrid", "distributed.tensor=2", "distributed.pipeline=2"],
    ),
}


@pytest.fixture(scope="module")
def split_corpus(tmp_path_factory) -> str:
    """Training text, and validation text whose sequences divide by no number of ranks."""
    import argparse
    import textwrap

    folder = tmp_path_factory.mktemp("split")
    (folder / "train.txt").write_text(Path(str(argparse.__file__)).read_text())
    (folder / "validation.txt").write_text(Path(str(textwrap.__file__)).read_text()[:1700])
    return str(folder)


def score(mesh, folder: str, corpus: str, options: list[str]) -> dict[str, float]:
    from contextlib import nullcontext

    from muster import runs
    from muster.train.evaluate import evaluate
    from muster.worker import prepare

    recipe = load(RECIPES["gpt"], short_recipe([*overrides_for("gpt", corpus), *options]))
    Path(folder, "ranks").mkdir(parents=True, exist_ok=True)
    job = prepare(recipe, mesh, runs.Run(Path(folder)))
    found = evaluate(job.task, job.engine, "validation", job.mesh, 4, nullcontext)
    job.observer.close()
    return found.scores


@pytest.mark.parametrize("layout", LAYOUTS)
def test_perplexity_is_that_of_one_process(ranks, split_corpus, tmp_path, layout):
    alone = ranks(1)(score, str(tmp_path / "alone"), split_corpus, [])[0]
    world, options = LAYOUTS[layout]
    together = ranks(world)(score, str(tmp_path / "together"), split_corpus, options)
    assert alone["bytes"] == 1700
    for scores in together:
        assert scores["tokens"] == alone["tokens"]
        assert scores["bytes"] == alone["bytes"]
        assert scores["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-6)
        assert scores["bits_per_byte"] == pytest.approx(alone["bits_per_byte"], rel=1e-6)
