"""Fewer points of a curve, whose peaks stay: the mean, the least and the greatest of neighbouring steps."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np

from muster.page.document import Curves, Series
from muster.page.table import Floats, Table

POINTS = 800  # at most; a screen is hardly wider
DIGITS = 6
UNITS = {
    "loss": "",
    "grad_norm": "",
    "lr": "",
    "samples_per_s": "samples/s",
    "tokens_per_s": "tokens/s",
    "audio_s_per_s": "× real time",
    "step_time_s": "s",
    "data_wait_s": "s",
    "memory_gib": "GiB",
    "mfu": "",
}
NO_SERIES = ("step", "epoch", "samples", "skipped", "profiled", "left_out", "time")


def curves(metrics: Table, times: Floats) -> Curves:
    """`times`: when each step ended. The neighbours of a point are a power of two, so that points stay where
    they are while a run goes on."""
    size = bucket_size(metrics.rows)
    named = [name for name in metrics.names if name not in NO_SERIES]
    known = [name for name in UNITS if name in named]
    steps = metrics.column("step")
    return {
        "step": [int(step) for step in _lasts(steps, size)],
        "time": rounded(_lasts(times, size), 13),
        "series": {
            name: _series(metrics.column(name), size, _unit(name))
            for name in known + sorted(set(named) - set(known))
        },
    }


def bucket_size(rows: int) -> int:
    return 1 if rows <= POINTS else 2 ** math.ceil(math.log2(rows / POINTS))


def rounded(values: Floats, digits: int = DIGITS) -> Any:
    """Nested lists of the same shape, each number to so many significant digits, null where it is not finite."""
    finite = np.isfinite(values) & (values != 0)
    known = np.where(finite, values, 1.0)
    places = digits - 1 - np.floor(np.log10(np.abs(known)))
    up, down = 10.0 ** np.clip(places, 0, 300), 10.0 ** np.clip(-places, 0, 300)
    short = np.round(known * up / down) / up * down  # exact powers of ten: no digits come back
    found = np.where(finite, short, values).astype(object)
    found[~np.isfinite(values)] = None
    return found.tolist()


def _unit(name: str) -> str:
    return UNITS.get(name, f"{name.removesuffix('_per_s')}/s" if name.endswith("_per_s") else "")


def _lasts(values: Floats, size: int) -> Floats:
    return np.append(values[size - 1 : -1 : size], values[-1:])


def _series(values: Floats, size: int, unit: str) -> Series:
    if size == 1:
        return {"unit": unit, "mean": rounded(values), "low": [], "high": []}
    values = np.where(np.isfinite(values), values, np.nan)
    padded = np.append(values, np.full(-len(values) % size, np.nan)).reshape(-1, size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a point without any number is NaN
        return {
            "unit": unit,
            "mean": rounded(np.nanmean(padded, 1)),
            "low": rounded(np.nanmin(padded, 1)),
            "high": rounded(np.nanmax(padded, 1)),
        }
