"""What a workload is: a model, its data, its loss and its score. It knows nothing of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from muster.data.corpus import Split
from muster.data.loader import Batch, Source

Counts = dict[str, float]


@dataclass(frozen=True)
class Example:
    """One scored sample, for the table of the worst."""

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
    assets: dict[str, Any]  # what a checkpoint carries besides weights, e.g. the vocabulary

    def build_model(self) -> nn.Module: ...
    def source(self, split: Split) -> Source | None:
        """Indexed samples of a split, or None where the recipe's data has no such split."""
        ...

    def collate(self, samples: Sequence[Any], epoch: int | None) -> Batch:
        """Pad samples into CPU tensors. `epoch` keys augmentation; None means none (evaluation)."""
        ...

    def prepare(self, batch: Batch) -> Batch:
        """On the device: features and augmentation."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """A float32 scalar, *summed* over units. The loop divides, once, by the global batch's."""
        ...

    def score(self, model: nn.Module, batch: Batch) -> Score: ...
    def summarise(self, counts: Counts) -> dict[str, float]:
        """Rates such as `wer` from summed counts."""
        ...
