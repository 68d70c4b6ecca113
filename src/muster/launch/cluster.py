"""Which rank this process is. Everything else asks here; nobody else reads these variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from muster.errors import LaunchError


@dataclass(frozen=True)
class Place:
    """One process among all that train together."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1


class ClusterEnvironment(Protocol):
    """One way of starting ranks."""

    def detect(self, env: Mapping[str, str]) -> bool: ...
    def place(self, env: Mapping[str, str]) -> Place: ...


class Torchrun:
    """torchrun, muster's own launcher, and everything else that speaks torch.distributed's variables."""

    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

    def detect(self, env: Mapping[str, str]) -> bool:
        return "RANK" in env and "WORLD_SIZE" in env

    def place(self, env: Mapping[str, str]) -> Place:
        missing = [name for name in self.needed if name not in env]
        if missing:
            raise LaunchError(
                f"RANK and WORLD_SIZE are set, but {', '.join(missing)} is not; start with torchrun or "
                "muster train, or unset RANK and WORLD_SIZE"
            )
        values = {}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            text = env.get(name, env["WORLD_SIZE"])
            if not text.isdecimal():
                raise LaunchError(f"{name} is {text!r}, expected a whole number")
            values[name] = int(text)
        for rank, world in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
            if values[rank] >= values[world]:
                raise LaunchError(
                    f"{rank}={values[rank]} does not exist with {world}={values[world]}"
                )
        return Place(
            values["RANK"], values["WORLD_SIZE"], values["LOCAL_RANK"], values["LOCAL_WORLD_SIZE"]
        )


ENVIRONMENTS: tuple[ClusterEnvironment, ...] = (Torchrun(),)


def detect(env: Mapping[str, str]) -> Place:
    """The first environment that recognises itself; else this process is alone."""
    for environment in ENVIRONMENTS:
        if environment.detect(env):
            return environment.place(env)
    return Place()
