"""Checking a set-up: from Python, and for `muster check`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.errors import LaunchError, MusterError
from muster.recipe.overrides import Overrides, as_texts

if TYPE_CHECKING:
    from muster.checks.findings import Report
    from muster.launch.cluster import Node

TIMEOUT_S = 30.0  # to wait for a rank, in each step


def check(
    recipe: str | Path | Mapping[str, Any] | None = None,
    overrides: Overrides | None = None,
    *,
    gpus: int | None = None,
    timeout: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Is this machine fit to train on? What `muster check --json` prints: `fit`, `verdict`, and `findings`
    with their causes and cures.

    With a `recipe`, also whether its data is read fast enough. `gpus`: ranks; by default every GPU, or 2 CPU
    ranks. `timeout`: seconds to wait for a rank, in each step.
    """
    from muster.launch import cluster

    rank_info = cluster.detect(os.environ)
    if rank_info.world > 1:
        raise LaunchError(
            f"muster.check starts the ranks itself, but {rank_info.launcher} has started {rank_info.world} "
            "already; use `muster check` there"
        )
    with _as_file(recipe, as_texts(overrides)) as (name, changes):
        report = run_checks(name, changes, gpus, timeout)
    assert report is not None  # this process is no rank
    return report.as_dict()


def run_checks(
    recipe: str | None,
    changes: list[str],
    gpus: int | None,
    timeout: float,
    node: Node | None = None,
) -> Report | None:
    """None where another process has the report."""
    if changes and not recipe:
        raise MusterError(f"{changes[0]}: key=value changes a recipe; name it with --recipe")
    if recipe:
        from muster.recipe.load import load

        load(recipe, changes)  # a bad name is refused before any process starts
    from muster.checks.context import Options
    from muster.checks.run import check as run_check

    return run_check(Options(timeout, recipe, changes), gpus, node)


@contextmanager
def _as_file(
    recipe: str | Path | Mapping[str, Any] | None, changes: list[str]
) -> Iterator[tuple[str | None, list[str]]]:
    """A document as a file, for the ranks to read; as long as they need it."""
    if not isinstance(recipe, Mapping):
        yield (None if recipe is None else str(recipe)), changes
        return
    from muster.recipe.describe import to_yaml
    from muster.recipe.load import load

    resolved = to_yaml(load(recipe, changes))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(resolved)
        yield str(path), []
