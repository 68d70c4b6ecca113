"""Samples that Python already has, as a `Source`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from muster.errors import DataError


class Samples(Protocol):
    """A list, or a map-style torch Dataset."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class ListSource:
    """A list of samples, or a map-style Dataset, read by several threads.

    `lengths`: proportional to what each sample costs to compute, such as its tokens; without them all
    count as equal. They decide which samples share a batch. `version` identifies the data beyond
    its number of samples and their lengths: a run does not resume on another one.
    """

    groups: None = None

    def __init__(
        self,
        samples: Samples,
        lengths: Sequence[float] | NDArray[np.float64] | Callable[[Any], float] | None = None,
        *,
        version: str = "",
    ) -> None:
        self.samples, self.version = samples, version
        self.broken: dict[int, str] = {}
        count = len(samples)
        if count == 0:
            raise DataError("ListSource: got no samples; return None for a split that is not there")
        if lengths is None:
            self.lengths = np.ones(count)
        elif callable(lengths):
            self.lengths = np.array([lengths(samples[i]) for i in range(count)], np.float64)
        else:
            self.lengths = np.asarray(lengths, np.float64)
        if self.lengths.shape != (count,) or not (self.lengths > 0).all():
            raise DataError(
                f"ListSource: {count} samples need as many lengths above 0, got {len(self.lengths)}, the "
                f"smallest {min(self.lengths, default=0)}"
            )

    def __len__(self) -> int:
        return len(self.samples)

    def load(self, index: int) -> Any:
        return self.samples[index]

    def name(self, index: int) -> str:
        return f"sample {index}"

    def preload(self, threads: int) -> None:
        """Nothing to do: samples are in memory, or their Dataset's concern."""

    def reserve(self, samples: int) -> None:
        """Likewise."""

    def fingerprint(self) -> bytes:
        return hashlib.sha256(self.version.encode()).digest() if self.version else b""
