"""global batch = micro-batch × accumulation × ranks, for whatever the recipe leaves open."""

import itertools
import re

import numpy as np
import pytest

from muster.data.batches import cut
from muster.errors import RecipeError
from muster.recipe.batch import (
    BatchSizes,
    micro_batches,
    nearest,
    scaling_words,
    settle,
    settle_as,
    solve,
)
from muster.recipe.load import load
from muster.recipe.schema import Recipe
from muster.recipe.training import Training
from muster.training.optimizer import peak_lr


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


@pytest.mark.parametrize(
    ("total", "per_device", "accumulation", "ranks", "words"),
    [
        (4, "auto", "auto", 8, "global_batch_size 8 (1 × 1 × 8)"),
        (10, 1, "auto", 4, "global_batch_size 8 (1 × 2 × 4), 12 (1 × 3 × 4)"),
        (
            8,
            "auto",
            3,
            4,
            "global_batch_size 12 (1 × 3 × 4); or per_device_batch_size 1 with "
            "gradient_accumulation_steps 2",
        ),
        (
            64,
            8,
            2,
            2,
            "global_batch_size 32 (8 × 2 × 2); or per_device_batch_size 8 with "
            "gradient_accumulation_steps 4",
        ),
        (100, 2, 3, 8, "global_batch_size 48 (2 × 3 × 8), 96 (4 × 3 × 8), 120 (5 × 3 × 8)"),
    ],
)
def test_a_contradiction_names_the_nearest_exact_numbers(
    total, per_device, accumulation, ranks, words
):
    assert advice(total, per_device, accumulation, ranks) == words


def test_exact_numbers_are_exact_and_none_is_nearer():
    seen = 0
    for total, size, steps, ranks in itertools.product(
        range(1, 25), ("auto", 1, 2, 3, 5, 8), ("auto", 1, 2, 3, 4), (1, 2, 3, 4, 6)
    ):
        words = advice(total, size, steps, ranks)
        if words is None:
            continue
        seen += 1
        batches = [
            tuple(map(int, found))
            for found in re.findall(r"(\d+) \((\d+) × (\d+) × (\d+)\)", words)
        ]
        for batch, *factors in batches:
            assert solve(training(batch, *factors[:2]), factors[2]).waste == 0
            assert factors[2] == ranks
        held = ranks * (steps if steps != "auto" else size if size != "auto" else 1)
        assert {g for g, *_ in batches} >= set(around(total, held)) - {total}
        split = re.search(r"size (\d+) with gradient_accumulation_steps (\d+)", words)
        assert (split is not None) == (total % ranks == 0)
        if split:
            kept, count = map(int, split.groups())
            assert kept * count * ranks == total
            limit = 1 if size == "auto" else size
            assert not [n for n in range(kept + 1, limit + 1) if total % (n * ranks) == 0]
            assert kept <= limit
    assert seen > 1000


def test_nearest_global_batches_divide_and_lie_next_to_the_total():
    for total, ranks, per_device in itertools.product(range(1, 41), (1, 2, 3, 8), (None, 1, 3, 4)):
        assert nearest(total, ranks, per_device) == around(total, ranks * (per_device or 1))


def test_ways_to_run_a_batch_are_those_that_waste_little():
    thinned = 0
    for total, ranks in itertools.product(range(1, 150), (1, 2, 3, 5, 8, 24)):
        ways, expected = micro_batches(total, ranks), all_ways(total, ranks)
        assert all(solve(training(total, w.per_device, w.accumulation), ranks) == w for w in ways)
        found = [(w.per_device, w.accumulation) for w in ways]
        if len(expected) <= 16:
            assert found == expected
            continue
        thinned += 1
        assert 10 <= len(found) <= 16
        assert found == sorted(set(found) & set(expected), reverse=True)
        assert found[0] == expected[0]
        assert found[-1] == expected[-1]
    assert thinned > 50


@pytest.mark.parametrize("total", [97, 720, 4096, 100_000])
def test_many_ways_are_thinned_to_the_least_wasteful_of_each_magnitude(total):
    ways = micro_batches(total, 1)
    sizes = [way.per_device for way in ways]
    assert len(ways) <= 16
    assert (sizes[0], sizes[-1]) == (total, 1)
    assert all(large / small <= total ** (2 / 14) + 1 for large, small in itertools.pairwise(sizes))
    assert sum(way.waste for way in ways[1:-1]) / len(ways) < 0.03
    if total == 4096:
        assert {2**n for n in range(13)} <= set(sizes)


def advice(total, per_device, accumulation, ranks) -> str | None:
    try:
        solve(training(total, per_device, accumulation), ranks)
    except RecipeError as error:
        return str(error).split("; nearest exact: ")[1]
    return None


def around(total, unit) -> list[int]:
    multiples = [n for n in range(1, total + unit + 1) if n % unit == 0]
    if total in multiples:
        return [total]
    below = [n for n in multiples if n < total]
    return below[-1:] + [n for n in multiples if n > total][:1]


def all_ways(total, ranks) -> list[tuple[int, int]]:
    """(size, accumulation): every accumulation there is, the fewest steps of each size."""
    fewest: dict[int, int] = {}
    for accumulation in range(1, total // ranks + 1):
        slots = accumulation * ranks
        fewest.setdefault((total + slots - 1) // slots, accumulation)
    return [
        (size, steps)
        for size, steps in fewest.items()
        if steps == 1 or size == min(fewest) or 8 * (size * steps * ranks - total) <= total
    ]


def recipe(**training) -> Recipe:
    return Recipe.model_validate({"training": {"steps": 1, **training}})


@pytest.mark.parametrize(("ranks", "total"), [(1, 16), (2, 32), (4, 64)])
def test_two_given_numbers_and_the_ranks_of_the_first_start_define_the_global_batch(ranks, total):
    given = recipe(per_device_batch_size=4, gradient_accumulation_steps=4)
    assert solve(given.training, ranks) == BatchSizes(total, 4, 4, ranks)
    first = settle(given, ranks).training
    assert (first.global_batch_size, first.scale_with_ranks) == (total, "none")
    assert solve(first, ranks) == BatchSizes(total, 4, 4, ranks)
    for later in (1, 2, 8, 16):  # resumed there
        assert solve(first, later).global_batch == total
        assert settle(recipe(**first.model_dump(exclude={"steps"})), later).training == first
        assert settle_as(given, first).training == first


def test_scaling_that_was_not_set_is_told_with_what_it_comes_from():
    implied = recipe(per_device_batch_size=4, gradient_accumulation_steps=2).training
    assert scaling_words(implied) == (
        "training.scale_with_ranks=batch (what per_device_batch_size 4 and gradient_accumulation_steps 2 "
        "mean without global_batch_size)"
    )
    given = recipe(global_batch_size=8, scale_with_ranks="batch").training
    assert scaling_words(given) == "training.scale_with_ranks=batch"


def test_a_run_goes_on_only_with_the_number_it_was_started_with():
    first = settle(recipe(per_device_batch_size=4, gradient_accumulation_steps=4), 2).training
    other = recipe(per_device_batch_size=5, gradient_accumulation_steps=4)
    with pytest.raises(RecipeError, match=r"made 32 samples per optimizer step, no multiple of 20"):
        settle_as(other, first)


def test_one_number_leaves_the_default_alone():
    assert recipe(per_device_batch_size=4).training.global_batch_size == 32
    assert recipe(gradient_accumulation_steps=4).training.scale_with_ranks == "none"


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "given",
    [
        {"global_batch_size": 16, "scale_with_ranks": "batch_and_lr"},
        {"per_device_batch_size": 16, "scale_with_ranks": "batch_and_lr"},
        {
            "global_batch_size": 16,
            "scale_with_ranks": "batch",
            "lr_scaling": "linear",
            "reference_batch_size": 16,
        },
    ],
)
def test_batch_and_learning_rate_grow_with_the_ranks_where_asked(ranks, given):
    """16, 32, 64, 128 and 1e-3, 2e-3, 4e-3: the table of the LMU-ASR guide."""
    first = settle(recipe(lr=1e-3, **given), ranks).training
    assert first.global_batch_size == 16 * ranks
    assert peak_lr(first) == pytest.approx(1e-3 * ranks)
    assert settle_as(recipe(lr=1e-3, **given), first).training == first


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"scale_with_ranks": "batch_and_lr", "lr_scaling": "sqrt", "reference_batch_size": 1},
            "would both scale lr; use scale_with_ranks=batch",
        ),
        (
            {"scale_with_ranks": "batch", "global_batch_size": 16}
            | {"per_device_batch_size": 4, "gradient_accumulation_steps": 2},
            "16 is not per_device_batch_size 4 × gradient_accumulation_steps 2",
        ),
        (
            {"scale_with_ranks": "none"}
            | {"per_device_batch_size": 4, "gradient_accumulation_steps": 2},
            r"global_batch_size is not given, .* as in the recipe.yaml .*; give global_batch_size",
        ),
    ],
)
def test_what_cannot_be_scaled_is_refused_with_the_key_to_change(given, words):
    changes = [f"training.{key}={value}" for key, value in given.items()]
    gone = [] if "global_batch_size" in given else ["~training.global_batch_size"]
    with pytest.raises(RecipeError, match=words):
        load("speech", [*gone, *changes])
