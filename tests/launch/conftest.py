"""A run that nobody disturbs, for those that are."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from training import run_training


@pytest.fixture(scope="session")
def undisturbed(ranks, recipe, tmp_path_factory) -> Callable[[int], list[dict[str, float]]]:
    """`undisturbed(2)`: the metrics of the tiny recipe's first 40 steps on that many ranks."""

    @functools.cache
    def run(world: int) -> list[dict[str, float]]:
        folder = tmp_path_factory.mktemp(f"undisturbed-{world}")
        return ranks(world)(run_training, str(folder), ["training.steps=40"], recipe)[0]

    return run
