"""Running the parity table on the devices at hand."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from muster.check.parity import (
    TrainingCurve,
    distance,
    result_line,
    rows_for,
    short_recipe,
    training_curve,
)
from muster.errors import LaunchError, MusterError
from muster.hardware import inventory
from muster.launch import cluster
from muster.launch.spawn import spawn
from muster.parallel import mesh as meshes
from muster.parallel.layout import Layout
from muster.recipe.load import load

SMALL = ["training.global_batch_size=16", "training.scale_with_ranks=none"]
SMALL += ["data.sequence_length=64", "data.pool_batches=1"]


def run_parity(recipe: str, ranks: int | None, only: str | None = None) -> list[dict[str, Any]]:
    """One line per strategy that this number of ranks allows, compared with one process.

    `only` keeps the rows whose name begins so.
    """
    found = inventory.detect()
    ranks = found.rank_count(ranks, cpu_ranks=2)
    if ranks < 2:
        raise LaunchError(
            f"--parity compares ranks with one process, and this machine offers {found.describe()}"
        )
    load(recipe, short_recipe(SMALL))  # a bad name is refused before any process starts
    names = [row.name for row in rows_for(ranks) if row.name.startswith(only or "")]
    if not names:
        known = ", ".join(row.name for row in rows_for(ranks))
        raise MusterError(
            f"--strategy: no row begins with {only!r} on {ranks} ranks; there are {known}"
        )
    with tempfile.TemporaryDirectory() as folder:
        spawn(_alone, (recipe, folder), 1)
        spawn(_together, (recipe, folder, names), ranks)
        lines: list[dict[str, Any]] = json.loads(Path(folder, "table.json").read_text())
    if all("left_out" in line for line in lines):
        raise MusterError(f"nothing could be compared; first: {lines[0]['left_out']}")
    return lines


def _join() -> meshes.Mesh:
    torch.backends.cuda.matmul.allow_tf32 = False
    rank_info = cluster.detect(os.environ)
    return meshes.join(
        rank_info.rank, rank_info.local_rank, Layout(replicate=rank_info.world), "auto", 300.0
    )


def _alone(recipe: str, folder: str) -> None:
    mesh = _join()
    made = training_curve(load(recipe, short_recipe(SMALL)), mesh, Path(folder, "alone"))
    torch.save(vars(made), Path(folder, "alone.pt"))
    os._exit(0)


def _together(recipe: str, folder: str, names: list[str]) -> None:
    mesh = _join()
    alone = TrainingCurve(**torch.load(Path(folder, "alone.pt"), weights_only=True))
    lines = []
    for number, row in enumerate(rows_for(mesh.world)):
        if row.name not in names:
            continue
        options = short_recipe([*SMALL, *row.options])
        try:
            made = training_curve(load(recipe, options), mesh, Path(folder, f"row-{number}"))
        except MusterError as error:  # this model cannot be split that way, or a library is missing
            lines.append({"strategy": row.name, "ranks": mesh.world, "left_out": str(error)})
            continue
        lines.append(result_line(row.name, mesh.world, distance(alone, made)))
    if mesh.first:
        Path(folder, "table.json").write_text(json.dumps(lines))
    mesh.barrier()
    os._exit(0)
