"""Running the parity table on the devices at hand."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from muster.checks.parity import (
    TrainingCurve,
    cause,
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
from muster.recipe.own_task import parse
from muster.tasks.own import settle_options

SMALL = ["training.global_batch_size=16", "training.scale_with_ranks=none"]
SMALL += ["data.sequence_length=64", "data.pool_batches=1"]


def recipe_for(task: str, folder: Path) -> str:
    """A recipe with nothing but a task: what `check --parity --task` trains without --recipe."""
    path = folder / "task.yaml"
    path.write_text(f"name: parity\ntask: {json.dumps(task)}\ntraining: {{steps: 5, lr: 1.0e-3}}\n")
    return str(path)


def run_parity(
    recipe: str, ranks: int | None, only: str | None = None, overrides: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """One line per strategy that this number of ranks allows, compared with one process.

    `only` keeps the rows whose name begins so.
    """
    changes = [*SMALL, *overrides]
    found = inventory.detect()
    ranks = found.rank_count(ranks, cpu_ranks=2)
    if ranks < 2:
        raise LaunchError(
            f"--parity compares ranks with one process, and this machine offers {found.describe()}"
        )
    # What is wrong with a name or a task's class is refused before any process starts.
    settle_options(load(recipe, short_recipe(changes)))
    names = [row.name for row in rows_for(ranks) if row.name.startswith(only or "")]
    if not names:
        known = ", ".join(row.name for row in rows_for(ranks))
        raise MusterError(
            f"--strategy: no row begins with {only!r} on {ranks} ranks; there are {known}"
        )
    with tempfile.TemporaryDirectory() as folder:
        _spawn(_alone, (recipe, changes, folder), 1, Path(folder))
        _spawn(_together, (recipe, changes, folder, names), ranks, Path(folder))
        lines: list[dict[str, Any]] = json.loads(Path(folder, "table.json").read_text())
    if all("left_out" in line for line in lines):
        raise MusterError(f"nothing could be compared; first: {lines[0]['left_out']}")
    return lines


def reason(error: MusterError) -> str:
    """Why a strategy cannot be compared, without what to change: nobody asked for it. What is missing, such as
    a library, is still said."""
    words = re.sub(r"^distributed\.\w+: (\d+, but )?", "", str(error))
    return re.sub(r"(; (?!.*; )|\. Change ).*$", "", words)


def _join() -> meshes.Mesh:
    torch.backends.cuda.matmul.allow_tf32 = False
    rank_info = cluster.detect(os.environ)
    return meshes.join(
        rank_info.rank, rank_info.local_rank, Layout(replicate=rank_info.world), "auto", 300.0
    )


def _spawn(
    function: Callable[..., None], arguments: tuple[Any, ...], ranks: int, folder: Path
) -> None:
    """What the user can fix is told as the rank wrote it down, without the stack traces of processes."""
    try:
        spawn(function, arguments, ranks)
    except Exception:
        refused = folder / "refused.txt"
        if refused.is_file():
            raise MusterError(refused.read_text()) from None
        raise


def _refuse(folder: str, error: MusterError) -> NoReturn:
    Path(folder, "refused.txt").write_text(str(error))
    os._exit(1)


def _alone(recipe: str, changes: list[str], folder: str) -> None:
    mesh = _join()
    try:
        loaded = load(recipe, short_recipe(changes))
        made = training_curve(loaded, mesh, Path(folder, "alone"))
    except MusterError as error:
        _refuse(folder, error)
    torch.save(vars(made), Path(folder, "alone.pt"))
    os._exit(0)


def _together(recipe: str, changes: list[str], folder: str, names: list[str]) -> None:
    mesh = _join()
    alone = TrainingCurve(**torch.load(Path(folder, "alone.pt"), weights_only=True))
    lines = []
    for number, row in enumerate(rows_for(mesh.world)):
        if row.name not in names:
            continue
        options = short_recipe([*changes, *row.options])
        try:
            made = training_curve(load(recipe, options), mesh, Path(folder, f"row-{number}"))
        except MusterError as error:  # this model cannot be split that way, or a library is missing
            lines.append({"strategy": row.name, "ranks": mesh.world, "left_out": reason(error)})
            continue
        except Exception as error:
            if parse(load(recipe, options).task) is None:
                raise
            why = f"{type(error).__name__}: {error}"  # of the user's model, on every rank
            lines.append({"strategy": row.name, "ranks": mesh.world, "failed": why})
            continue
        line = result_line(row.name, mesh.world, distance(alone, made))
        if not line["agrees"]:
            line["cause"] = cause(alone, made, mesh.world)
        lines.append(line)
    if mesh.first:
        Path(folder, "table.json").write_text(json.dumps(lines))
    mesh.barrier()
    os._exit(0)
