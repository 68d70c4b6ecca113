"""global batch = micro-batch × accumulation × data ranks, solved for whatever is left open."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from muster.errors import RecipeError
from muster.recipe.schema import Recipe
from muster.recipe.training import Training

WAYS = 16  # to run one global batch, at most, that a search looks at
WASTE = 1 / 8  # the most that one of them leaves empty


@dataclass(frozen=True)
class BatchSizes:
    """`per_device` is the largest micro-batch; if it does not divide evenly, some have one less."""

    global_batch: int
    per_device: int
    accumulation: int
    data_ranks: int

    @property
    def waste(self) -> float:
        """Unused slots, as a fraction of the global batch: ranks wait for the largest micro-batch."""
        places = self.per_device * self.accumulation * self.data_ranks
        return (places - self.global_batch) / self.global_batch


def scaling_words(training: Training) -> str:
    """`scale_with_ranks`, and what else than setting it leads to its value."""
    each, steps = training.per_device_batch_size, training.gradient_accumulation_steps
    words = f"training.scale_with_ranks={training.scale_with_ranks}"
    if training.scale_with_ranks == "batch" and isinstance(each, int) and isinstance(steps, int):
        words += (
            f" (what per_device_batch_size {each} and gradient_accumulation_steps {steps} mean without "
            "global_batch_size)"
        )
    return words


def settle(recipe: Recipe, data_ranks: int) -> Recipe:
    """The recipe of a first start on `data_ranks`: `scale_with_ranks` applied, as plain numbers."""
    return recipe.model_copy(update={"training": _scaled(recipe.training, data_ranks)})


def settle_as(recipe: Recipe, first: Training) -> Recipe:
    """Like `settle`, with the numbers that a run, or its rank 0, already has: those of its first
    start, which another number of ranks does not change."""
    training = recipe.training
    if training.scale_with_ranks == "none" or first.scale_with_ranks != "none":
        return recipe
    if first.global_batch_size % training.global_batch_size:
        raise RecipeError(
            f"training.global_batch_size: the first start of this run made {first.global_batch_size} "
            f"samples per optimizer step, no multiple of {training.global_batch_size}; give the number "
            "of the first start, or start a new run"
        )
    found = _scaled(training, 1).model_copy(update={"global_batch_size": first.global_batch_size})
    if training.scale_with_ranks == "batch_and_lr":
        found = found.model_copy(update={"lr": first.lr})
    return recipe.model_copy(update={"training": found})


def _scaled(training: Training, data_ranks: int) -> Training:
    if training.scale_with_ranks == "none":
        return training
    found: dict[str, Any] = {
        "scale_with_ranks": "none",
        "global_batch_size": training.global_batch_size * data_ranks,
    }
    if training.scale_with_ranks == "batch_and_lr":
        found["lr"] = training.lr * data_ranks
    if isinstance(training.per_device_batch_size, int):
        found["gradient_accumulation_steps"] = "auto"  # other ranks need other steps for this batch
    return training.model_copy(update=found)


def solve(training: Training, data_ranks: int) -> BatchSizes:
    """Fill in `auto`. The global batch is the recipe's and never changes after the first start."""
    training = _scaled(training, data_ranks)
    total = training.global_batch_size
    per_device, accumulation = training.per_device_batch_size, training.gradient_accumulation_steps
    size = per_device if isinstance(per_device, int) else None
    steps = accumulation if isinstance(accumulation, int) else None
    solved = steps or math.ceil(total / ((size or total) * data_ranks))
    slots = solved * data_ranks
    if slots > total:
        other = "use fewer ranks or steps"
        if size and not steps:
            other = f"raise training.per_device_batch_size above {size}, or use fewer ranks"
        raise RecipeError(
            f"training.global_batch_size: {total} cannot feed {data_ranks} ranks × {solved} "
            f"accumulation steps; raise it to at least {slots}, or {other}; "
            f"nearest exact: {_exact(total, data_ranks, size, steps)}"
        )
    needed = math.ceil(total / slots)
    if size and steps and needed != size:
        raise RecipeError(
            f"training.global_batch_size: {total} is not per_device_batch_size {size} × "
            f"gradient_accumulation_steps {steps} × {data_ranks} ranks (= {size * slots}); "
            f"set training.per_device_batch_size={needed}, or leave one of the two auto, or leave "
            "training.global_batch_size out (~training.global_batch_size); "
            f"nearest exact: {_exact(total, data_ranks, size, steps)}"
        )
    return BatchSizes(total, needed, solved, data_ranks)


def nearest(total: int, data_ranks: int, per_device: int | None = None) -> list[int]:
    """Global batches that `data_ranks` share evenly, in whole micro-batches of `per_device` if given:
    `total` itself, or else the one below it and the one above."""
    unit = data_ranks * (per_device or 1)
    below = total // unit * unit
    return [total] if below == total else [size for size in (below, below + unit) if size]


def micro_batches(total: int, data_ranks: int) -> list[BatchSizes]:
    """Ways to run `total` on `data_ranks` that are worth a search's time, largest micro-batch first;
    none if there are more ranks than samples.

    The largest and the smallest micro-batch are always there, between them what wastes little. Of
    too many, those of like magnitude give way to the least wasteful.
    """
    candidates, accumulation = [], 1
    while accumulation * data_ranks <= total:
        size = math.ceil(total / (accumulation * data_ranks))
        candidates.append(BatchSizes(total, size, accumulation, data_ranks))
        if size == 1:
            break
        accumulation = math.ceil(
            total / ((size - 1) * data_ranks)
        )  # the fewest with a smaller size
    if len(candidates) < 3:
        return candidates
    largest, *inner, smallest = candidates
    inner = [way for way in inner if way.waste <= WASTE]
    if len(inner) > WAYS - 2:
        inner = _thinned(inner, largest.per_device, smallest.per_device, WAYS - 2)
    return [largest, *inner, smallest]


def _thinned(
    candidates: list[BatchSizes], largest: int, smallest: int, keep: int
) -> list[BatchSizes]:
    """The least wasteful of each band of sizes; `keep` bands from largest to smallest, equally wide
    as ratios."""
    bands: dict[int, BatchSizes] = {}
    for way in candidates:
        band = int(keep * math.log(largest / way.per_device) / math.log(largest / smallest))
        if band not in bands or way.waste < bands[band].waste:
            bands[band] = way
    return list(bands.values())


def _exact(total: int, data_ranks: int, size: int | None, steps: int | None) -> str:
    """The nearest numbers that multiply without a rest, in words. Another global batch keeps the
    recipe's steps, or else its size; the same one keeps as much of the size as divides it."""
    held = steps or size or 1
    batches = set(nearest(total, data_ranks, held))
    if size and steps:
        batches.add(size * steps * data_ranks)
    found = []
    for batch in sorted(batches - {total}):
        other = batch // (held * data_ranks)
        factors = (held, other) if size and not steps else (other, held)
        found.append(f"{batch} ({factors[0]} × {factors[1]} × {data_ranks})")
    choices = [f"global_batch_size {', '.join(found)}"] if found else []
    if total % data_ranks == 0:
        share = total // data_ranks
        kept = max(n for n in range(1, min(size or 1, share) + 1) if share % n == 0)
        choices.append(
            f"per_device_batch_size {kept} with gradient_accumulation_steps {share // kept}"
        )
    return "; or ".join(choices)
