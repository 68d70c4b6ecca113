"""Window lengths that clips are padded to, chosen to minimize padding.

Few, because each length is compiled separately. Windows are counted in ticks of 20 ms, the
320 samples at 16 kHz of one frame of Whisper's encoder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

TICKS_PER_SECOND = 50
SHORTEST, LONGEST = 0.64, 30.0
_SLACK = 1e-6  # seconds, far below a sample: a duration's rounding must not cost a step


def choose_lengths(
    seconds: NDArray[Any], count: int, step: float = 0.32, longest: float = LONGEST
) -> tuple[float, ...]:
    """At most `count` window lengths, ascending, that pad clips of these durations least in all.

    Each is a multiple of `step` or `longest` itself, to whole ticks. The last holds the longest
    clip, unless that is beyond `longest`. Without clips, `longest` alone.
    """
    stride, limit = round(step * TICKS_PER_SECOND), _ticks(longest)
    if stride < 1 or not math.isclose(stride, step * TICKS_PER_SECOND):
        raise ValueError(f"step {step} is no multiple of {1 / TICKS_PER_SECOND} s")
    if len(seconds) == 0:
        return (limit / TICKS_PER_SECOND,)
    steps = np.ceil((np.asarray(seconds, np.float64) - _SLACK) / step).astype(np.int64)
    rounded = np.clip(steps * stride, min(_ticks(SHORTEST), limit), limit)
    lengths, clips = np.unique(rounded, return_counts=True)
    chosen = _least_padding(lengths, np.cumsum(clips), min(count, len(lengths)))
    return tuple(int(length) / TICKS_PER_SECOND for length in lengths[chosen])


def round_up(
    seconds: NDArray[Any], lengths: Sequence[float], longest: float = LONGEST
) -> NDArray[np.float64]:
    """For each clip the shortest of `lengths` that holds it; beyond the last of them, `longest`."""
    windows = np.array([*lengths, longest])
    return windows[np.searchsorted(windows[:-1], np.asarray(seconds, np.float64) - _SLACK)]


def _least_padding(lengths: NDArray[np.int64], clips: NDArray[np.int64], count: int) -> list[int]:
    """Which `count` of the ascending `lengths` to keep; `clips[i]` are no longer than `lengths[i]`.

    best[i] is the least total length of the windows of the first i lengths' clips, lengths[i - 1]
    being kept, with as many lengths kept as there were rounds.
    """
    total = len(lengths)
    below = np.concatenate([[0], clips])
    # [i, j]: lengths j + 1 to i share the window of the i-th. Nothing is covered by going back.
    cost = lengths[:, None] * (below[1:, None] - below[None, :-1])
    cost = np.where(np.tri(total, dtype=bool), cost, np.iinfo(np.int64).max // 4)
    best = np.full(total + 1, np.iinfo(np.int64).max // 4)
    best[0] = 0
    before = []
    for _ in range(count):
        options = best[None, :-1] + cost
        before.append(options.argmin(1))
        best = np.concatenate([[np.iinfo(np.int64).max // 4], options.min(1)])
    kept, i = [], total
    for origin in reversed(before):
        kept.append(i - 1)
        i = int(origin[i - 1])
    return kept[::-1]


def _ticks(seconds: float) -> int:
    return math.ceil((seconds - _SLACK) * TICKS_PER_SECOND)
