"""The sizes of a parallel run: one frozen object owns them and checks them once."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from muster.errors import RecipeError


@dataclass(frozen=True)
class Layout:
    """How many ways the work is split along each axis; the product is the world size.

    `replicate` ranks hold the whole model and different data; `shard` ranks share one copy of the
    model and still see different data; `tensor` and `pipeline` ranks share one copy and one batch.
    Ranks are numbered with `pipeline` outermost and `tensor` innermost, so that the chattiest
    neighbours sit closest together.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for axis, size in asdict(self).items():
            if size < 1:
                raise RecipeError(f"layout: {axis} is {size}, but every size is at least 1")

    @property
    def world(self) -> int:
        return math.prod(asdict(self).values())

    @property
    def data_ranks(self) -> int:
        """How many ranks see different samples: the divisor of the global batch."""
        return self.replicate * self.shard

    def data_rank(self, rank: int) -> int:
        """Which share of each global batch `rank` computes."""
        return rank // self.tensor % self.data_ranks

    def check_world(self, world: int) -> None:
        if self.world != world:
            sizes = " × ".join(f"{axis} {size}" for axis, size in asdict(self).items() if size > 1)
            raise RecipeError(
                f"layout: {sizes or 'one rank'} makes {self.world} ranks, but {world} were started; "
                "change the sizes or --gpus"
            )


PRESETS = {"ddp": lambda world: Layout(replicate=world)}


def layout_for(strategy: str, world: int) -> Layout:
    """The sizes a named strategy means on `world` ranks; `auto` takes the simplest."""
    return PRESETS["ddp" if strategy == "auto" else strategy](world)
