"""Equal work and little padding on eight ranks, for the lengths that speech has."""

import sys
from pathlib import Path

import numpy as np
import pytest

from real import LIBRISPEECH, needs_speech

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import balance


@pytest.mark.parametrize("batch", [64, 128])
def test_a_long_tailed_set_pads_little_and_every_rank_works_as_much(batch):
    seconds = balance.long_tailed()
    found = balance.measure(balance.planned(seconds, batch, balance.BUCKETS, epochs=1))
    assert found.balance < 1.05
    assert found.padding < 0.10
    other = balance.measure(balance.sampled(seconds, batch, epochs=1))
    assert other.balance > 1.3
    assert other.padding > 0.4


@pytest.mark.parametrize("rows", [100, 1000])
@pytest.mark.parametrize(("batch", "most"), [(16, 0.10), (64, 0.10), (256, 0.12)])
def test_by_row_groups_it_pads_little_too(rows, batch, most):
    """78 batches of 256 over 16 windows pad 10.8 % whatever their order."""
    seconds = balance.long_tailed()
    steps = balance.planned(seconds, batch, balance.BUCKETS, epochs=2, rows=rows)
    found = balance.measure(steps)
    assert found.balance < 1.05
    assert found.padding < most
    free = balance.measure(balance.planned(seconds, batch, balance.BUCKETS, epochs=1))
    assert found.padding < free.padding + 0.015


@needs_speech
@pytest.mark.parametrize("batch", [16, 32])
def test_read_speech_pads_little_and_every_rank_works_as_much(batch):
    """251 clips: more than 32 in a batch leaves too few batches to sort them into."""
    seconds = balance.durations(str(LIBRISPEECH))
    assert len(seconds) == 251
    found = balance.measure(balance.planned(seconds, batch, balance.BUCKETS, epochs=20))
    assert found.balance < 1.05
    assert found.padding < 0.10


def test_what_is_measured_is_the_arithmetic_of_it():
    step = [(2, 3.0, 4.0), (2, 5.0, 10.0)]
    found = balance.measure(iter([step]))
    assert found.balance == pytest.approx(10 / 8)
    assert found.quadratic == pytest.approx(50 / 34)
    assert found.padding == pytest.approx(1 - 14 / 16)


def test_the_plan_in_use_covers_the_set():
    seconds = balance.long_tailed(1000)
    rows = [rows for step in balance.planned(seconds, 64, 8, epochs=1) for rows, *_ in step]
    sound = sum(s for step in balance.planned(seconds, 64, 8, epochs=1) for *_, s in step)
    assert (len(rows), set(rows)) == (15 * 8, {8})
    assert 0.9 < sound / seconds.sum() < 1.0
    assert np.all(seconds >= 1.0)
