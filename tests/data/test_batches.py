"""The same global batches on any layout, dealt so that every rank has the same work."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from muster.data import batches as batches_module
from muster.data.batches import MAX_WAIT_POOLS, BatchPlan, cut, eval_shards, keyed_generator
from muster.data.speech.files import RowGroups
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
@pytest.mark.parametrize("kind", ["lengths", "windows", "groups"])
def test_evaluation_covers_each_sample_on_exactly_one_rank(world, samples, kind):
    lengths = speech_lengths(samples)
    windows = None if kind == "lengths" else np.ceil(lengths)
    groups = np.arange(samples) // 7 if kind == "groups" else None
    shards = eval_shards(lengths, windows, world, 4, groups)
    assert len(shards) == world
    seen = [i for shard in shards for batch in shard for i in batch]
    assert sorted(seen) == list(range(samples))
    assert all(1 <= len(batch) <= 4 for shard in shards for batch in shard)
    if windows is not None:
        assert all(len(set(windows[batch])) == 1 for shard in shards for batch in shard)
    sizes = [sum(map(len, shard)) for shard in shards]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("groups", [None, np.arange(400) % 7])
def test_evaluation_without_windows_goes_by_length_alone(groups):
    lengths = speech_lengths(400)
    order = np.argsort(lengths, kind="stable")
    for rank, shard in enumerate(eval_shards(lengths, None, 4, 10, groups)):
        assert [i for batch in shard for i in batch] == order[rank::4].tolist()
        assert [len(batch) for batch in shard] == [10] * 10


def reads_to_score(lengths, windows, world, groups, order_by) -> tuple[int, int]:
    """Row groups read by all ranks together and by the busiest, where each keeps two."""
    counts = []
    for shard in eval_shards(lengths, windows, world, 8, order_by):
        kept = RowGroups(lambda key: np.zeros(1, np.int8), budget=2)
        for batch in shard:
            for i in batch:
                kept.get((0, int(groups[i])))
        counts.append(sum(kept.reads.values()))
    return sum(counts), max(counts)


def test_evaluation_reads_a_row_group_once_in_each_window():
    lengths, groups = speech_lengths(3000), row_groups(3000, size=100)
    windows = np.ceil(lengths / 5) * 5
    touched = sum(len(set(groups[windows == w])) for w in set(windows))
    for world in (1, 4):
        total, most = reads_to_score(lengths, windows, world, groups, groups)
        assert total <= touched + (world - 1) * len(set(windows))
        assert most < 1.2 * touched / world + len(set(windows))
        by_length, _ = reads_to_score(lengths, windows, world, groups, None)
        assert by_length > 2500


def test_random_numbers_depend_on_the_whole_key():
    keys = [(1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3)]
    drawn = [tuple(keyed_generator(*key).integers(0, 1 << 30, 4)) for key in keys]
    assert len(set(drawn)) == 4
    assert drawn[0] == tuple(keyed_generator(1, 2, 3).integers(0, 1 << 30, 4))


def row_groups(count: int, size: int = 40, seed: int = 3) -> np.ndarray:
    """The row group of each sample; sizes differ, numbers have gaps, as where clips are left out."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 2 * size, 2 * count // size + 1)
    return 3 * np.repeat(np.arange(len(sizes)), sizes)[:count]


@pytest.mark.parametrize("windows", [False, True])
def test_through_row_groups_every_sample_comes_at_most_once_an_epoch(windows):
    lengths, groups = speech_lengths(1003), row_groups(1003)
    rounded = np.ceil(lengths) if windows else None
    plan = BatchPlan(lengths, 16, 1, pool_batches=4, groups=groups, windows=rounded)
    again = BatchPlan(lengths, 16, 1, pool_batches=4, groups=groups, windows=rounded)
    epochs = []
    for epoch in range(3):
        used = np.concatenate([plan.batch(62 * epoch + step) for step in range(62)])
        assert len(used) == len(set(used.tolist())) == 992
        epochs.append(used.tolist())
    assert epochs[0] != epochs[1] != epochs[2]
    assert again.batch(62 + 7).tolist() == plan.batch(62 + 7).tolist() == epochs[1][112:128]
    left_out = [frozenset(range(1003)) - set(used) for used in epochs]
    assert len(set(left_out)) == 3


def test_an_epoch_is_in_few_row_groups_at_a_time():
    lengths, groups = speech_lengths(8000), row_groups(8000)
    plan = BatchPlan(lengths, 16, 0, pool_batches=4, groups=groups)
    batches = [set(groups[plan.batch(step)].tolist()) for step in range(plan.steps_per_epoch)]
    first, last = {}, {}
    for step, used in enumerate(batches):
        for group in used:
            first.setdefault(group, step)
            last[group] = step
    open_at = [sum(first[g] <= step <= last[g] for g in first) for step in range(len(batches))]
    # A stretch has at least 64 samples, at most one group of up to 79 more; and a remainder.
    assert max(last[g] - first[g] for g in first) <= 2 * (64 + 79) / 16
    assert np.mean(open_at) < 10
    assert len(first) > 190


def test_without_row_groups_an_epoch_is_everywhere_at_once():
    groups = row_groups(8000)
    plan = BatchPlan(speech_lengths(8000), 16, 0, pool_batches=4)
    early = {g for step in range(50) for g in groups[plan.batch(step)].tolist()}
    assert len(early) > 150, "of about 200, in a tenth of the epoch"


def test_row_groups_come_in_another_order_each_epoch_and_samples_within_a_stretch_too():
    groups = np.repeat(np.arange(20), 50)
    plan = BatchPlan(np.ones(1000), 50, 0, pool_batches=2, groups=groups)
    orders = []
    for epoch in range(2):
        stretches = [
            np.concatenate([plan.batch(20 * epoch + 2 * s), plan.batch(20 * epoch + 2 * s + 1)])
            for s in range(10)
        ]
        assert all(len(set(groups[s].tolist())) == 2 for s in stretches)
        assert all(len(set(groups[s[:50]].tolist())) == 2 for s in stretches), "mixed in a batch"
        orders.append([tuple(sorted(set(groups[s].tolist()))) for s in stretches])
    assert orders[0] != orders[1]
    assert set(orders[0]) != set(orders[1]), "neighbours change"


def test_row_groups_still_batch_like_lengths():
    lengths = speech_lengths(8000)
    plan = BatchPlan(lengths, 16, 0, pool_batches=16, groups=row_groups(8000))
    within = np.mean([lengths[plan.batch(step)].std() for step in range(plan.steps_per_epoch)])
    assert within < 0.35 * lengths.std()


def test_batches_hold_one_window_and_in_it_any_clip():
    lengths = speech_lengths(8000)
    windows = np.ceil(lengths / 2) * 2
    plan = BatchPlan(lengths, 16, 0, windows=windows)
    batches = [plan.batch(step) for step in range(plan.steps_per_epoch)]
    mixed = sum(len(set(windows[ids])) > 1 for ids in batches)
    assert mixed <= len(set(windows)) - 1, "only where one window ends and the next begins"
    whole = [ids for ids in batches if set(windows[ids]) == {6.0}]
    assert np.mean([lengths[ids].std() for ids in whole]) > 0.9 * lengths[windows == 6.0].std()
    sequence = [windows[ids].max() for ids in batches]
    assert sequence != sorted(sequence)


@pytest.mark.parametrize("size", [10, 40, 400])
def test_clips_wait_for_others_of_their_window_a_few_pools_at_most(size):
    lengths, groups = speech_lengths(8000), row_groups(8000, size)
    windows = np.ceil(lengths / 2) * 2
    plan = BatchPlan(lengths, 16, 0, pool_batches=4, groups=groups, windows=windows)
    batches = [plan.batch(step) for step in range(plan.steps_per_epoch)]
    alone = BatchPlan(lengths, 16, 0, pool_batches=4, groups=groups)
    by_length = [alone.batch(step) for step in range(alone.steps_per_epoch)]

    def span(batches):
        """Samples that come between the first and the last of one row group, at most."""
        first, last = {}, {}
        for step, ids in enumerate(batches):
            for group in groups[ids].tolist():
                first.setdefault(group, step)
                last[group] = step
        return 16 * max(last[g] - first[g] for g in first)

    waiting = 15 * len(set(windows))
    assert span(batches) <= MAX_WAIT_POOLS * 64 + 2 * (64 + 2 * size) + waiting
    assert span(by_length) <= 2 * (64 + 2 * size)
    mixed = np.mean([len(set(windows[ids])) > 1 for ids in batches])
    assert mixed < 0.15
    assert plan.reserve_size == 64 * (2 + MAX_WAIT_POOLS) // 2
    assert alone.reserve_size == 64


@pytest.mark.parametrize("size", [10, 40, 400])
def test_with_room_for_its_reach_a_plan_reads_each_row_group_once(size):
    lengths, groups = speech_lengths(8000), row_groups(8000, size)
    windows = np.ceil(lengths / 2) * 2
    plan = BatchPlan(lengths, 16, 0, pool_batches=4, groups=groups, windows=windows)
    rows = np.bincount(groups)
    kept = RowGroups(
        lambda key: np.zeros(rows[key[1]], np.int8), 2 * (plan.reserve_size + rows.max())
    )
    for step in range(plan.steps_per_epoch):
        for group in groups[plan.batch(step)].tolist():
            kept.get((0, group))
    assert sum(kept.reads.values()) <= 1.02 * len(set(groups.tolist()))


def test_row_groups_come_in_no_order_of_their_windows():
    lengths, groups = speech_lengths(8000), row_groups(8000)
    windows = np.ceil(lengths / 2) * 2
    plan = BatchPlan(lengths, 16, 0, pool_batches=16, groups=groups, windows=windows)
    longest = [windows[plan.batch(step)].max() for step in range(400)]
    assert 0.3 < np.mean(np.diff(longest) > 0) / np.mean(np.diff(longest) != 0) < 0.7


def test_threads_at_the_border_of_an_epoch_plan_it_once(monkeypatch):
    plan, planned, real = BatchPlan(np.ones(64), 8, seed=0), [], keyed_generator

    def slow(*key):
        planned.append(key)
        time.sleep(0.05)
        return real(*key)

    monkeypatch.setattr(batches_module, "keyed_generator", slow)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(plan.batch, [8, 9, 10, 11, 12, 13]))
    assert planned == [(0, 1)]
    assert len({i for ids in found for i in ids.tolist()}) == 48
