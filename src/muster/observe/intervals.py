"""Sets of time spans. A set is a list of (start, end), in order and apart from each other."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """Whatever any of `spans` covers; they may overlap and come in any order."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def minus(these: list[Span], those: list[Span]) -> list[Span]:
    """What the set `these` covers and the set `those` does not."""
    left: list[Span] = []
    first = 0  # of `those`: earlier ones end before anything still to come
    for start, end in these:
        while first < len(those) and those[first][1] <= start:
            first += 1
        for cut in range(first, len(those)):
            if those[cut][0] >= end:
                break
            if those[cut][0] > start:
                left.append((start, those[cut][0]))
            start = max(start, those[cut][1])
        if start < end:
            left.append((start, end))
    return left


def length(spans: list[Span]) -> float:
    return sum(end - start for start, end in spans)
