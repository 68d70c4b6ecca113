"""The same global batches on any layout, dealt so that every rank has the same work."""

import numpy as np
import pytest

from muster.data.batches import BatchPlan, cut, eval_shard, keyed_generator
from muster.errors import RecipeError

WORLDS = (1, 2, 3, 4, 8)
ACCUMULATIONS = (1, 2, 4)


def speech_lengths(count: int, seed: int = 0) -> np.ndarray:
    """Seconds, as clips of speech are spread: many short, a few long."""
    return np.random.default_rng(seed).lognormal(mean=1.6, sigma=0.5, size=count).clip(0.5, 30.0)


def walk(plan: BatchPlan, steps: int) -> list[list[int]]:
    return [plan.batch(step).tolist() for step in range(steps)]


@pytest.mark.parametrize("batch_size", [32, 37])
@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("world", WORLDS)
def test_the_parts_of_all_ranks_are_the_global_batch_and_nothing_twice(
    world, accumulation, batch_size
):
    lengths = speech_lengths(1003)
    alone, plan = BatchPlan(lengths, batch_size, seed=3), BatchPlan(lengths, batch_size, seed=3)
    for step in range(plan.steps_per_epoch + 3):
        parts = cut(plan.batch(step), lengths, world, accumulation)
        assert [len(rank) for rank in parts] == [accumulation] * world
        dealt = [i for rank in parts for micro in rank for i in micro.tolist()]
        assert len(dealt) == len(set(dealt)) == batch_size
        assert sorted(dealt) == sorted(alone.batch(step).tolist())


@pytest.mark.parametrize(("size", "world", "accumulation"), [(37, 3, 4), (9, 8, 1), (64, 8, 4)])
def test_micro_batches_and_ranks_differ_by_at_most_one_sample(size, world, accumulation):
    lengths = speech_lengths(size)
    parts = cut(np.arange(size), lengths, world, accumulation)
    micro = [len(m) for rank in parts for m in rank]
    whole = [sum(len(m) for m in rank) for rank in parts]
    assert max(micro) - min(micro) <= 1
    assert max(whole) - min(whole) <= 1
    assert min(micro) >= 1


def test_the_cut_follows_length_and_not_the_order_it_was_given():
    lengths = speech_lengths(40)
    shuffled = np.random.default_rng(1).permutation(40)
    parts, again = cut(np.arange(40), lengths, 4, 2), cut(shuffled, lengths, 4, 2)
    for rank, other in zip(parts, again, strict=True):
        for micro, same in zip(rank, other, strict=True):
            assert micro.tolist() == same.tolist()


def test_samples_are_dealt_back_and_forth():
    lengths = np.arange(1.0, 9.0)
    (first,), (second,) = cut(np.arange(8), lengths, ranks=2, accumulation=1)
    assert lengths[first].tolist() == [1, 4, 5, 8]
    assert lengths[second].tolist() == [2, 3, 6, 7]


def test_an_epoch_uses_every_sample_once_but_for_the_remainder():
    plan = BatchPlan(speech_lengths(1003), 37, seed=0)
    assert plan.steps_per_epoch == 27
    for epoch in range(3):
        used = np.concatenate([plan.batch(27 * epoch + step) for step in range(27)])
        assert len(used) == len(set(used.tolist())) == 999
        assert used.min() >= 0
        assert used.max() < 1003


def test_the_samples_left_out_are_others_in_the_next_epoch():
    plan = BatchPlan(speech_lengths(1003), 100, seed=0)
    left_out = [
        frozenset(range(1003)) - {i for s in range(10) for i in plan.batch(10 * e + s).tolist()}
        for e in range(4)
    ]
    assert all(len(rest) == 3 for rest in left_out)
    assert len(set(left_out)) == 4


def test_epochs_differ_and_seeds_decide():
    lengths = speech_lengths(500)
    plan = BatchPlan(lengths, 16, seed=1)
    first = walk(plan, 31)
    assert first != [plan.batch(31 + step).tolist() for step in range(31)]
    assert first == walk(BatchPlan(lengths, 16, seed=1), 31)
    assert first != walk(BatchPlan(lengths, 16, seed=2), 31)


def test_any_step_is_found_without_walking_there():
    lengths = speech_lengths(203)
    walked = walk(BatchPlan(lengths, 16, seed=5), 1001)
    jumped = BatchPlan(lengths, 16, seed=5)
    for step in (1000, 3, 12, 500):
        assert jumped.batch(step).tolist() == walked[step]
    assert jumped.epoch_of(11) == 0
    assert jumped.epoch_of(12) == 1
    assert jumped.epoch_of(1000) == 83


def test_batches_of_like_length_come_in_no_order_of_length():
    plan = BatchPlan(speech_lengths(2000), 20, seed=0)
    means = np.array([plan.lengths[plan.batch(step)].mean() for step in range(100)])
    assert 0.3 < (np.diff(means) > 0).mean() < 0.7, "about as often longer as shorter"
    within = np.mean([plan.lengths[plan.batch(step)].std() for step in range(100)])
    assert within < 0.25 * plan.lengths.std()


@pytest.mark.parametrize("accumulation", [1, 4])
def test_eight_ranks_carry_equal_cost_and_little_padding(accumulation):
    lengths = speech_lengths(8000)
    plan = BatchPlan(lengths, 64, seed=0)
    ratios, filled, cells = [], 0.0, 0.0
    for step in range(plan.steps_per_epoch):
        parts = cut(plan.batch(step), lengths, 8, accumulation)
        cost = [sum(lengths[m].max() * len(m) for m in rank) for rank in parts]
        ratios.append(max(cost) / np.mean(cost))
        filled += sum(lengths[m].sum() for rank in parts for m in rank)
        cells += sum(cost)
    assert np.mean(ratios) < 1.05
    assert 1 - filled / cells < 0.10


def test_every_micro_step_is_balanced_not_only_their_sum():
    lengths = speech_lengths(8000)
    plan = BatchPlan(lengths, 128, seed=0)
    ratios = []
    for step in range(plan.steps_per_epoch):
        parts = cut(plan.batch(step), lengths, 4, 4)
        for micro in zip(*parts, strict=True):
            cost = [lengths[m].max() * len(m) for m in micro]
            ratios.append(max(cost) / np.mean(cost))
    assert np.mean(ratios) < 1.05


def test_a_batch_larger_than_the_data_names_the_key_and_the_limit():
    with pytest.raises(
        RecipeError, match=r"training\.global_batch_size: 8 .* 7 usable .* 7 or less"
    ):
        BatchPlan(np.ones(7), 8, seed=0)
    assert BatchPlan(np.ones(7), 7, seed=0).steps_per_epoch == 1


def test_a_batch_smaller_than_the_ranks_names_the_key_and_the_least():
    with pytest.raises(RecipeError, match=r"training\.global_batch_size to at least 8"):
        cut(np.arange(7), np.ones(7), ranks=4, accumulation=2)


@pytest.mark.parametrize("samples", [1, 5, 23, 64])
@pytest.mark.parametrize("world", [1, 3, 8, 70])
def test_evaluation_covers_each_sample_on_exactly_one_rank(world, samples):
    lengths = speech_lengths(samples)
    shards = [eval_shard(lengths, rank, world, batch_size=4) for rank in range(world)]
    seen = [i for shard in shards for batch in shard for i in batch]
    assert sorted(seen) == list(range(samples))
    assert all(1 <= len(batch) <= 4 for shard in shards for batch in shard)
    sizes = [sum(map(len, shard)) for shard in shards]
    assert max(sizes) - min(sizes) <= 1


def test_evaluation_batches_hold_clips_of_like_length():
    lengths = speech_lengths(400)
    for batch in eval_shard(lengths, 1, 4, batch_size=10):
        assert lengths[batch].tolist() == sorted(lengths[batch])


def test_random_numbers_depend_on_the_whole_key():
    keys = [(1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3)]
    drawn = [tuple(keyed_generator(*key).integers(0, 1 << 30, 4)) for key in keys]
    assert len(set(drawn)) == 4
    assert drawn[0] == tuple(keyed_generator(1, 2, 3).integers(0, 1 << 30, 4))
