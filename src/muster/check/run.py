"""Running the parity table on the devices at hand."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from muster.check.parity import Course, course, describe, distance, rows_for, short_recipe
from muster.errors import LaunchError, RecipeError
from muster.hardware import inventory
from muster.launch import cluster
from muster.launch.spawn import spawn
from muster.parallel import mesh as meshes
from muster.parallel.layout import Layout
from muster.recipe.load import load

SMALL = ["training.global_batch_size=16", "data.sequence_length=64", "data.pool_batches=1"]


def run_parity(recipe: str, ranks: int | None) -> list[dict[str, Any]]:
    """One line per strategy that these ranks can carry, measured against one process."""
    found = inventory.detect()
    ranks = ranks or max(2, len(found.gpus))
    if found.gpus and ranks > len(found.gpus):
        raise LaunchError(f"--gpus {ranks}, but this machine offers {found.describe()}")
    load(recipe, short_recipe(SMALL))  # a bad name is refused before any process starts
    with tempfile.TemporaryDirectory() as folder:
        spawn(_alone, (recipe, folder), 1)
        spawn(_together, (recipe, folder), ranks)
        lines: list[dict[str, Any]] = json.loads(Path(folder, "table.json").read_text())
    return lines


def _join() -> meshes.Mesh:
    torch.backends.cuda.matmul.allow_tf32 = False
    place = cluster.detect(os.environ)
    return meshes.join(place.rank, place.local_rank, Layout(replicate=place.world), "auto", 300.0)


def _alone(recipe: str, folder: str) -> None:
    mesh = _join()
    made = course(load(recipe, short_recipe(SMALL)), mesh, Path(folder, "alone"))
    torch.save(vars(made), Path(folder, "alone.pt"))
    os._exit(0)


def _together(recipe: str, folder: str) -> None:
    mesh = _join()
    alone = Course(**torch.load(Path(folder, "alone.pt"), weights_only=True))
    lines = []
    for number, row in enumerate(rows_for(mesh.world)):
        if "zero" in row.name and importlib.util.find_spec("deepspeed") is None:
            continue
        options = short_recipe([*SMALL, *row.options])
        try:
            made = course(load(recipe, options), mesh, Path(folder, f"row-{number}"))
        except RecipeError as error:  # this model or this torch cannot be cut that way
            lines.append({"strategy": row.name, "ranks": mesh.world, "left_out": str(error)})
            continue
        lines.append(describe(row.name, mesh.world, distance(alone, made)))
    if mesh.first:
        Path(folder, "table.json").write_text(json.dumps(lines))
    mesh.barrier()
    os._exit(0)
