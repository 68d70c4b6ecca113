"""The stages of a pipeline: how many, which layers each has, how many micro-batches pass through.

Does not import torch's pipelining, so that the planner starts sooner.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from muster.errors import RecipeError
from muster.models.plan import ParallelPlan
from muster.recipe.distributed import PipelineOptions

ONE_STAGE = ("gpipe", "1f1b")  # schedules with one stage per rank
MANY_STAGES = ("interleaved", "zero-bubble")


def check_schedule(options: PipelineOptions, plan: ParallelPlan) -> None:
    """torch 2.11's split of the backward pass fails on a decoder's graph; 2.13's works, but not where a
    stage has two inputs."""
    if options.schedule != "zero-bubble":
        return
    key = "distributed.pipeline_options.schedule: zero-bubble"
    if torch.__version__ < (2, 13):  # type: ignore[operator]
        raise RecipeError(
            f"{key} needs torch 2.13, this is {torch.__version__}; use 1f1b or interleaved"
        )
    if plan.embeds:
        raise RecipeError(
            f"{key} splits the backward pass, which torch cannot do for the stages of an encoder and "
            "a decoder; use 1f1b or interleaved"
        )


def stages_per_rank(options: PipelineOptions) -> int:
    many, asked = options.schedule in MANY_STAGES, options.stages_per_rank
    if not isinstance(asked, int):
        return 2 if many else 1
    if many != (asked > 1):
        raise RecipeError(
            f"distributed.pipeline_options.stages_per_rank: {asked}, but schedule {options.schedule} "
            f"needs {'2 or more' if many else 'exactly 1'}; use auto, or schedule "
            f"{' or '.join(ONE_STAGE if many else MANY_STAGES)}"
        )
    return asked


def microbatches(options: PipelineOptions, pipeline: int, samples: int) -> int:
    """Micro-batches per schedule step: more make the bubble smaller, but each has fewer samples."""
    asked = options.microbatches
    if not isinstance(asked, int):
        return pipeline * max(1, min(4, samples // pipeline))
    few = asked < pipeline and options.schedule != "gpipe"
    odd = asked % pipeline and options.schedule in MANY_STAGES
    if few or odd:
        near = pipeline * max(1, round(asked / pipeline))
        raise RecipeError(
            f"distributed.pipeline_options.microbatches: schedule {options.schedule} on {pipeline} "
            f"pipeline ranks needs {'a multiple of' if odd else 'at least'} {pipeline}, not {asked}; "
            f"use {near}, or auto"
        )
    return asked


def cut_evenly(costs: Sequence[float], parts: int) -> list[tuple[int, int]]:
    """Contiguous layers in `parts` non-empty groups that minimize the cost of the most expensive."""
    best: dict[tuple[int, int], tuple[float, list[tuple[int, int]]]] = {(0, 0): (0.0, [])}
    for part in range(1, parts + 1):
        for stop in range(part, len(costs) - (parts - part) + 1):
            best[part, stop] = min(
                (
                    max(best[part - 1, start][0], sum(costs[start:stop])),
                    [*best[part - 1, start][1], (start, stop)],
                )
                for start in range(part - 1, stop)
                if (part - 1, start) in best
            )
    return best[parts, len(costs)][1]
