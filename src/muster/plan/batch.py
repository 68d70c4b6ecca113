"""global batch = micro-batch × accumulation × data ranks, solved for whatever is left open."""

from __future__ import annotations

import math
from dataclasses import dataclass

from muster.errors import RecipeError
from muster.recipe.schema import Training


@dataclass(frozen=True)
class BatchSizes:
    """`per_device` is the largest micro-batch; where the division leaves a rest, some hold one less."""

    global_batch: int
    per_device: int
    accumulation: int
    data_ranks: int


def solve(training: Training, data_ranks: int) -> BatchSizes:
    """Fill in `auto`. The global batch is the recipe's and never changes."""
    total = training.global_batch_size
    per_device, accumulation = training.per_device_batch_size, training.gradient_accumulation_steps
    if isinstance(accumulation, int):
        solved = accumulation
    else:
        limit = per_device if isinstance(per_device, int) else total
        solved = math.ceil(total / (limit * data_ranks))
    slots = solved * data_ranks
    if slots > total:
        other = "use fewer ranks or steps"
        if isinstance(per_device, int) and not isinstance(accumulation, int):
            other = f"raise training.per_device_batch_size above {per_device}, or use fewer ranks"
        raise RecipeError(
            f"training.global_batch_size: {total} cannot feed {data_ranks} ranks × {solved} "
            f"accumulation steps; raise it to at least {slots}, or {other}"
        )
    needed = math.ceil(total / slots)
    if isinstance(per_device, int) and isinstance(accumulation, int) and needed != per_device:
        raise RecipeError(
            f"training.global_batch_size: {total} is not per_device_batch_size {per_device} × "
            f"gradient_accumulation_steps {solved} × {data_ranks} ranks (= {per_device * slots}); "
            f"set training.per_device_batch_size={needed}, or leave one of the two auto"
        )
    return BatchSizes(total, needed, solved, data_ranks)
