"""A task: a model, its data, its loss and its metrics. It does not depend on ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from muster.data.corpus import Split
from muster.data.loader import Batch, Inputs, Source
from muster.models.weights import Weights
from muster.recipe.schema import Recipe

Counts = dict[str, float]
Lengths = NDArray[np.float64]
AnyRank = Callable[[bool], bool]  # this rank is not done → some rank is not done


@dataclass(frozen=True)
class Example:
    """One scored sample, for the table of worst samples."""

    id: int
    reference: str
    hypothesis: str
    edits: int


@dataclass(frozen=True)
class Score:
    """Counts add up over batches and ranks; only `Task.summarise` turns them into rates."""

    counts: Counts
    examples: list[Example] = field(default_factory=list)


class Task(Protocol):
    @property
    def recipe(self) -> Recipe: ...
    @property
    def assets(self) -> dict[str, Any]:
        """What a checkpoint carries besides weights, e.g. the vocabulary."""
        ...

    def build_model(self) -> nn.Module:
        """The whole model, on the caller's default device."""
        ...

    def build_part(self, start: int, stop: int) -> nn.Module:
        """Layers `start` … `stop - 1` of a model with a pipeline plan."""
        ...

    def weights(self) -> Weights | None:
        """Initial values by parameter; None where `build_model` initializes them."""
        ...

    def source(self, split: Split) -> Source | None:
        """Indexed samples of a split, or None where the recipe's data has no such split."""
        ...

    def collate(
        self, samples: Sequence[Any], epoch: int | None, longest: float | None = None
    ) -> Batch:
        """Pad samples into CPU tensors. `epoch` keys augmentation; None means none (evaluation).

        `longest` is the greatest length in the global batch, for models whose output depends on
        padding: the result then does not depend on how the batch was split.
        """
        ...

    def windows(self, lengths: Lengths, *, training: bool) -> Lengths | None:
        """What samples of these lengths are padded to; None where the output does not depend on padding.
        Samples of different windows are never scored in one batch."""
        ...

    def prepare(self, batch: Batch) -> Batch:
        """On the device: features and augmentation."""
        ...

    def inputs(self, batch: Batch) -> Inputs:
        """What the model is called with."""
        ...

    def eval_inputs(self, batch: Batch, any_rank: AnyRank) -> Inputs:
        """What the model is called with in evaluation. An autoregressive model continues while `any_rank`
        has unfinished rows, since a step may have collectives."""
        ...

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """A float32 scalar, *summed* over units. The loop divides, once, by the global batch's."""
        ...

    def score(self, output: Any, batch: Batch) -> Score:
        """Counts from the model's output."""
        ...

    def summarise(self, counts: Counts) -> dict[str, float]:
        """Rates such as `wer` from summed counts."""
        ...
