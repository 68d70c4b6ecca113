"""Which samples are scored, on which rank."""

import numpy as np
import pytest

from muster.data.sources import ListSource
from muster.parallel.layout import Layout
from muster.parallel.mesh import Mesh
from muster.training.evaluate import _rank_batches, choose_samples


@pytest.mark.parametrize(("count", "limit"), [(10, None), (10, 10), (10, 99), (1000, 7), (10, 9)])
def test_a_limited_score_takes_samples_from_everywhere(count, limit):
    chosen = choose_samples(count, limit)
    assert len(set(chosen.tolist())) == len(chosen) == min(count, limit or count)
    assert np.diff(chosen, prepend=0, append=count).max() <= -(-count // len(chosen))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("windowed", [False, True])
def test_the_chosen_samples_are_each_scored_once_at_any_world_size(world, windowed):
    lengths = np.random.default_rng(0).uniform(1, 9, 50)
    source, chosen = ListSource(list(range(50)), lengths), choose_samples(50, 13)
    windows = np.ceil(lengths) if windowed else None
    scored = []
    for rank in range(world):
        mesh = Mesh(rank, rank, Layout(replicate=world), None, None)
        scored += [i for ids, _ in _rank_batches(source, windows, mesh, 2, chosen) for i in ids]
    assert sorted(scored) == chosen.tolist()
