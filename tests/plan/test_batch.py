"""global batch = micro-batch × accumulation × ranks, for whatever the recipe leaves open."""

import numpy as np
import pytest

from muster.data.batches import cut
from muster.errors import RecipeError
from muster.plan.batch import BatchSizes, solve
from muster.recipe.schema import Training


def training(total, per_device="auto", accumulation="auto") -> Training:
    return Training(
        steps=1,
        global_batch_size=total,
        per_device_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
    )


@pytest.mark.parametrize(
    ("total", "per_device", "accumulation", "ranks", "solved"),
    [
        (64, "auto", "auto", 1, (64, 1)),
        (64, "auto", "auto", 8, (8, 1)),
        (64, "auto", "auto", 3, (22, 1)),
        (64, 8, "auto", 1, (8, 8)),
        (64, 8, "auto", 4, (8, 2)),
        (64, 100, "auto", 4, (16, 1)),
        (64, 7, "auto", 4, (6, 3)),
        (10, 2, "auto", 3, (2, 2)),
        (64, "auto", 4, 2, (8, 4)),
        (64, "auto", 3, 2, (11, 3)),
        (64, 8, 4, 2, (8, 4)),
        (64, 11, 3, 2, (11, 3)),
        (8, 1, 1, 8, (1, 1)),
    ],
)
def test_what_is_left_open_is_solved(total, per_device, accumulation, ranks, solved):
    sizes = solve(training(total, per_device, accumulation), ranks)
    assert sizes == BatchSizes(total, *solved, ranks)


def test_the_solution_is_what_the_cut_makes_of_a_batch():
    for total in (7, 16, 33):
        for ranks in (1, 2, 3, 7):
            for per_device in ("auto", 3, 5, 40):
                sizes = solve(training(total, per_device), ranks)
                parts = cut(np.arange(total), np.ones(total), ranks, sizes.accumulation)
                micro = [len(m) for rank in parts for m in rank]
                assert max(micro) == sizes.per_device
                assert per_device == "auto" or sizes.per_device <= per_device


@pytest.mark.parametrize(
    ("total", "per_device", "accumulation", "ranks", "words"),
    [
        (4, "auto", "auto", 8, r"4 cannot feed 8 ranks × 1 .* at least 8, or use fewer ranks"),
        (8, "auto", 3, 4, r"8 cannot feed 4 ranks × 3 accumulation .* at least 12"),
        (10, 1, "auto", 4, r"10 cannot feed 4 ranks .* training\.per_device_batch_size above 1"),
        (64, 8, 2, 2, r"64 is not per_device_batch_size 8 × .* 2 × 2 ranks \(= 32\); .*size=16"),
        (64, 16, 4, 2, r"64 is not per_device_batch_size 16 × .* 4 × 2 ranks \(= 128\); .*size=8"),
    ],
)
def test_contradictions_are_refused_with_the_numbers(total, per_device, accumulation, ranks, words):
    with pytest.raises(RecipeError, match=r"^training\.global_batch_size: " + words):
        solve(training(total, per_device, accumulation), ranks)
