from __future__ import annotations

from pathlib import Path

import pytest

from muster.check.parity import Course
from parity.table import train_row


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Some two hundred kilobytes of Python, as text files of many lengths."""
    import argparse
    import json
    import tarfile
    import typing

    folder = tmp_path_factory.mktemp("text")
    for module in (argparse, json, tarfile, typing):
        source = Path(str(module.__file__)).read_text()
        (folder / f"{module.__name__}.txt").write_text(source)
    return str(folder)


@pytest.fixture(scope="session")
def course_of(ranks, small_corpus, tmp_path_factory):
    """The course of a model under some options on some ranks; each is run once."""
    kept: dict[tuple[object, ...], Course] = {}

    def run(model: str, world: int, options: tuple[str, ...] = (), accumulation: int = 1) -> Course:
        key = (model, world, options, accumulation)
        if key not in kept:
            folder = str(tmp_path_factory.mktemp("row"))
            kept[key] = ranks(world)(
                train_row, folder, model, small_corpus, list(options), accumulation
            )[0]
        return kept[key]

    return run
