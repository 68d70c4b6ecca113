"""A run that a scheduler starts: what SLURM and Kubernetes need to know about it."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from muster.errors import LaunchError
from muster.reading.text import in_one_line
from muster.recipe.schema import Recipe
from muster.run_directory import check_name


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
    least: int | None = None  # of an elastic run: so many nodes are enough, and `nodes` the most
    secret: bytes | None = field(default=None, repr=False)  # the user's own, from MUSTER_SECRET

    def __post_init__(self) -> None:
        """A shell and a scheduler read these names."""
        check_name(self.name)
        for name in self.environment:
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                raise LaunchError(
                    f"the environment variable {in_one_line(name)!r} cannot be handed to ranks: names have "
                    "letters, digits and _ only; unset it"
                )

    @property
    def asked_nodes(self) -> str:
        """For --nodes."""
        return str(self.nodes) if self.least is None else f"{self.least}:{self.nodes}"

    @property
    def name(self) -> str:
        return self.run.name
