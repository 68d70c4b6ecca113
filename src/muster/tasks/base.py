"""A task: a model, its data, its loss and its metrics. It does not depend on ranks."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from torch import Tensor, nn

from muster.data.corpus import Split
from muster.data.loader import Batch, Inputs, Source
from muster.errors import RecipeError
from muster.models.weights import Weights
from muster.recipe.schema import Recipe
from muster.workloads import WORKLOADS, Better, Workload, workload

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


class Task(ABC):
    """`build_model`, `source`, `collate` and `loss` make a task; everything else has a default."""

    Options: ClassVar[type[BaseModel] | None] = None  # what the recipe's `task_options` may hold
    blocks: ClassVar[tuple[str, ...]] = ()  # classes of repeated layers; else those found are used
    compiles: ClassVar[bool] = (
        False  # a task of one's own: whether `training.compile: auto` compiles
    )
    captures: ClassVar[bool] = False  # likewise for CUDA graphs: no step may synchronize
    scores: ClassVar[Mapping[str, Better]] = {}
    """Of a task of one's own: names that `summarise` gives, and whether the smaller or the larger is
    better. The first chooses the best checkpoint unless `evaluation.metric` names another."""

    def __init__(self, recipe: Recipe, assets: dict[str, Any] | None = None) -> None:
        self.recipe = recipe
        self.assets: dict[str, Any] = dict(assets or {})
        """What a checkpoint carries besides weights, e.g. a vocabulary: whatever JSON can hold. Given
        back when the checkpoint is opened, so that training data need not be read again."""

    @cached_property
    def options(self) -> Any:
        """The recipe's `task_options`, as an instance of `Options`."""
        return read_options(type(self), self.recipe)

    @property
    def facts(self) -> Workload:
        found = workload(self.recipe.task)
        if self.recipe.task in WORKLOADS:
            return found
        scores = self.scores
        if not scores and type(self).summarise is Task.summarise and type(self).score is Task.score:
            scores = {"loss": "min"}
        return dataclasses.replace(
            found, compiles=self.compiles, captures=self.captures, scores=scores
        )

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The whole model, on the caller's default device. Its weights follow torch's random state,
        which is seeded before, unless `weights` gives them."""

    @abstractmethod
    def source(self, split: Split) -> Source | None:
        """Indexed samples of a split, or None where there is no such split."""

    @abstractmethod
    def collate(
        self, samples: Sequence[Any], epoch: int | None, longest: float | None = None
    ) -> Batch:
        """Pad samples into CPU tensors. `epoch` keys augmentation; None means none (evaluation).

        `longest` is the greatest length in the global batch, for models whose output depends on
        padding: the result then does not depend on how the batch was split.
        """

    @abstractmethod
    def loss(self, output: Any, batch: Batch) -> Tensor:
        """A float32 scalar, *summed* over units. The loop divides, once, by the global batch's."""

    def build_part(self, start: int, stop: int) -> nn.Module:
        """Layers `start` … `stop - 1` of a model with a pipeline plan."""
        raise RecipeError(
            f"distributed.strategy: the model of {self.recipe.task} cannot be split into pipeline stages"
        )

    def weights(self) -> Weights | None:
        """Initial values by parameter; None where `build_model` initializes them."""
        return None

    def windows(self, lengths: Lengths, *, training: bool) -> Lengths | None:
        """What samples of these lengths are padded to; None where the output does not depend on padding.
        Samples of different windows are never scored in one batch."""
        return None

    def prepare(self, batch: Batch) -> Batch:
        """On the device: features and augmentation."""
        return batch

    def inputs(self, batch: Batch) -> Inputs:
        """What the model is called with: by default the first of the batch's tensors."""
        return Inputs((next(iter(batch.tensors.values())),))

    def eval_inputs(self, batch: Batch, any_rank: AnyRank) -> Inputs:
        """What the model is called with in evaluation. An autoregressive model continues while `any_rank`
        has unfinished rows, since a step may have collectives."""
        return self.inputs(batch)

    def score(self, output: Any, batch: Batch) -> Score:
        """Counts from the model's output; by default the loss and its units."""
        return Score({"loss": float(self.loss(output, batch)), "units": float(batch.units)})

    def summarise(self, counts: Counts) -> dict[str, float]:
        """Rates such as `wer` from summed counts; by default each over `units`."""
        if not (units := counts.get("units")):
            raise RecipeError(
                f"score counts {', '.join(counts)} and no units, which its sums are divided by; add units, or "
                "write summarise"
            )
        rates = {name: count / units for name, count in counts.items() if name != "units"}
        return {**rates, "units": units}

    def remarks(self, scores: dict[str, float], worst: Sequence[Example]) -> list[str]:
        """What explains a bad score, and which key to change; shown beside it."""
        return []

    def example(self) -> Any:
        """A sample as long as samples may be, for a plan without data; None where only data can tell."""
        return None


def read_options(task: type[Task], recipe: Recipe) -> Any:
    """`task_options` as an instance of the task's `Options`; None where it has none."""
    given, expected = recipe.task_options, task.Options
    if expected is None:
        if given:
            raise RecipeError(
                f"task_options.{next(iter(given))}: {task.__name__} takes no options; leave it out, or "
                "give the class an `Options`, a pydantic model"
            )
        return None
    return _validated(expected, given, task.__name__)


def _validated(expected: type[BaseModel], given: dict[str, Any], name: str) -> BaseModel:
    from muster.recipe.describe import closest

    known = {field.alias or key for key, field in expected.model_fields.items()}
    for key in given:
        if key not in known:
            near = closest(key, known)
            hint = f"nearest is task_options.{near}" if near else f"it has {', '.join(known)}"
            raise RecipeError(f"task_options.{key}: no such key of {name}; {hint}")
    try:
        return expected.model_validate(given)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, ("task_options", *problem["loc"])))
        words = problem["msg"].removeprefix("Value error, ")
        raise RecipeError(f"{where}: got {problem['input']!r}; {words}") from None
