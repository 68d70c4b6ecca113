from __future__ import annotations

import json
from pathlib import Path

import pytest

from muster.checks.parity import TrainingCurve
from parity.table import train_row


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Some two hundred kilobytes of Python, every paragraph a document."""
    import argparse
    import tarfile
    import typing

    folder = tmp_path_factory.mktemp("text")
    with (folder / "paragraphs.jsonl").open("w") as file:
        for module in (argparse, tarfile, typing):
            paragraphs = Path(str(module.__file__)).read_text().split("\n\n")
            file.writelines(json.dumps({"text": p}) + "\n" for p in paragraphs if p.strip())
    return str(folder)


@pytest.fixture(scope="session")
def course_of(ranks, small_corpus, tmp_path_factory):
    """The course of a model under some options on some ranks; each is run once."""
    kept: dict[tuple[object, ...], TrainingCurve] = {}

    def run(
        model: str, world: int, options: tuple[str, ...] = (), accumulation: int = 1
    ) -> TrainingCurve:
        key = (model, world, options, accumulation)
        if key not in kept:
            folder = str(tmp_path_factory.mktemp("row"))
            kept[key] = ranks(world)(
                train_row, folder, model, small_corpus, list(options), accumulation
            )[0]
        return kept[key]

    return run
