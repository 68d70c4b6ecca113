"""A run that a scheduler starts: what SLURM and Kubernetes need to know about it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from muster.recipe.schema import Recipe


@dataclass(frozen=True)
class ClusterJob:
    """`run` is an existing run directory with `recipe.yaml` in it, on storage that all nodes share."""

    run: Path
    recipe: Recipe
    nodes: int
    ranks: int  # on each node
    gpus: bool  # each rank has a GPU; else ranks compute on the CPU
    environment: dict[str, str] = field(default_factory=dict)  # for every rank
    python: str = sys.executable
    least_nodes: int | None = None  # of an elastic run: that many of `nodes` are enough

    @property
    def name(self) -> str:
        return self.run.name
