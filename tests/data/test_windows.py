"""Window lengths: no choice of as many pads less."""

import itertools

import numpy as np
import pytest

from muster.data.speech.audio import SAMPLE_RATE
from muster.data.speech.whisper_features import HOP
from muster.data.speech.windows import (
    LONGEST,
    TICKS_PER_SECOND,
    choose_lengths,
    round_up,
)
from muster.models.configs import WhisperConfig


def durations(count: int, seed: int = 0, longest: float = 30.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(1.8, 0.6, count), 0.3, longest)


def grid(longest: float) -> list[float]:
    """Every length allowed: multiples of 0.32 s from 0.64 s, and 30 s."""
    return [n * 0.32 for n in range(2, 94) if n * 0.32 < longest + 0.32] + [30.0]


def padding(seconds: np.ndarray, lengths) -> float:
    return sum(min(w for w in lengths if w >= s - 1e-9) - s for s in seconds)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_other_choice_pads_less(seed, count):
    seconds = durations(40, seed, longest=5.0)
    options = [w for w in grid(5.0) if w < 6]
    least = min(
        padding(seconds, chosen)
        for chosen in itertools.combinations(options, count)
        if chosen[-1] >= seconds.max()
    )
    lengths = choose_lengths(seconds, count)
    assert len(lengths) == count
    assert padding(seconds, lengths) == pytest.approx(least)


def test_lengths_are_whole_encoder_frames_on_the_grid():
    seconds = durations(5000)
    lengths = choose_lengths(seconds, 12)
    assert len(lengths) == 12
    assert list(lengths) == sorted(set(lengths))
    for length in lengths:
        assert any(abs(length - allowed) < 1e-9 for allowed in grid(30.0))
        assert length * 16000 == round(length * 16000)
        assert round(length * 16000) % 320 == 0
    assert lengths[-1] >= seconds.max()


def test_more_lengths_pad_less_and_none_is_spare():
    seconds = durations(2000)
    pads = [padding(seconds, choose_lengths(seconds, count)) for count in (1, 2, 4, 8, 12, 24)]
    assert pads == sorted(pads, reverse=True)
    assert len(set(pads)) == len(pads)
    assert choose_lengths(np.full(9, 3.1), 12) == (3.2,)
    assert choose_lengths(np.array([1.0, 2.0]), 12) == (1.28, 2.24)


def test_the_order_of_the_clips_does_not_matter():
    seconds = durations(500)
    assert choose_lengths(seconds, 7) == choose_lengths(seconds[::-1], 7)


@pytest.mark.parametrize(
    ("seconds", "longest", "expected"),
    [
        ([0.1], 30.0, 0.64),
        ([0.64], 30.0, 0.64),
        ([0.6400001], 30.0, 0.64),  # a tenth of a microsecond is rounding
        ([0.6401], 30.0, 0.96),
        ([29.9], 30.0, 30.0),
        ([45.0], 30.0, 30.0),
        ([9.99], 10.0, 10.0),
        ([10.001], 10.005, 10.02),
        ([], 30.0, 30.0),
        ([0.2], 0.5, 0.5),
    ],
)
def test_the_ends_of_the_scale(seconds, longest, expected):
    assert choose_lengths(np.array(seconds), 3, longest=longest) == (expected,)


def test_a_step_of_half_a_frame_is_refused():
    with pytest.raises(ValueError, match=r"0\.33"):
        choose_lengths(np.array([1.0]), 1, step=0.33)


def test_a_clip_gets_the_shortest_window_that_holds_it():
    lengths = (1.28, 3.2, 6.4)
    clips = [0.2, 1.28, 1.2800001, 1.29, 3.2, 6.4, 6.41, 40.0]
    expected = [1.28, 1.28, 1.28, 3.2, 3.2, 6.4, 30.0, 30.0]
    assert round_up(np.array(clips), lengths).tolist() == expected
    assert round_up(np.array([7.0]), lengths, longest=8.0).tolist() == [8.0]


def test_every_training_clip_fits_its_window():
    seconds = durations(3000)
    lengths = choose_lengths(seconds, 12)
    windows = round_up(seconds, lengths)
    assert (windows >= seconds - 1e-6).all()
    assert set(windows.tolist()) == set(lengths)


def test_a_tick_is_a_position_of_whispers_encoder():
    """Two frames make one; models cannot take the numbers from here."""
    assert TICKS_PER_SECOND * 2 * HOP == SAMPLE_RATE
    assert WhisperConfig.source_positions == LONGEST * TICKS_PER_SECOND
