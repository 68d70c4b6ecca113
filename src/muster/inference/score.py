"""Scoring a checkpoint on a split of the data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from muster.data.corpus import Split
from muster.errors import MusterError
from muster.inference.load import Recogniser, Trained
from muster.parallel.layout import Layout
from muster.parallel.mesh import Mesh
from muster.training.evaluate import Evaluation, SingleProcess, evaluate
from muster.workloads import workload

BATCH = 16


def score(
    trained: Trained | Recogniser,
    split: Split | None = None,
    progress: Callable[[int, int], None] = lambda done, batches: None,
) -> Evaluation:
    """The score of a split of the recipe's data, in this one process.

    By default the test data, else validation.
    """
    mesh, recipe = Mesh(0, 0, Layout(), trained.device, None), trained.task.recipe
    asked = recipe.evaluation.batch_size
    splits: tuple[Split, ...] = (split,) if split else ("test", "validation")
    for wanted in splits:
        result = evaluate(
            trained.task,
            SingleProcess(trained.model),
            wanted,
            mesh,
            asked if isinstance(asked, int) else BATCH,
            nullcontext,
            progress,
        )
        if result is not None:
            return result
    cure = "name some as data.test or data.validation in the recipe"
    if workload(recipe.task).content is None:
        raise MusterError(f"{recipe.task}: its source returns no {' or '.join(splits)} samples")
    if workload(recipe.task).content == "speech":
        cure = f"`muster data make FOLDER {recipe.data.sources[0]} --split {splits[0]}` adds one"
    raise MusterError(f"{recipe.data.train_words} has no {' or '.join(splits)} split; {cure}")
