"""What is planned for a recipe, with or without its data."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from muster.errors import DataError
from muster.models.configs import MnistNetConfig
from muster.models.presets import PRESETS
from muster.parallel.compilation import choose, with_compile
from muster.planner.subject import Subject
from muster.recipe.schema import Recipe
from muster.tasks import build_task
from muster.workloads import workload

CLASSES = 1000  # of an image dataset that is not available


def open_subject(recipe: Recipe) -> Subject:
    """With its data where that is here, else with samples of the longest length."""
    facts = workload(recipe.task)
    if facts.content == "images":
        return _images(recipe)
    if recipe.data.train == "nowhere":
        data = recipe.data.model_copy(update={"train": facts.corpus})
        recipe = recipe.model_copy(update={"data": data})
    task = build_task(recipe)
    source = None
    if not facts.packed:
        with suppress(DataError):
            source = task.source("train")
    samples, compiles = len(source) if source else None, task.facts.compiles
    compiled = choose(recipe, samples, on_gpu=True, compiles=compiles).used
    return Subject(with_compile(recipe, compiled), task, source)


def _images(recipe: Recipe) -> Subject:
    """The number of outputs is the number of classes in the data."""
    recipe = with_compile(recipe, choose(recipe, None, on_gpu=True).used)
    try:
        task = build_task(recipe)
        return Subject(recipe, task, task.source("train"))
    except DataError:
        config: Any = PRESETS.get(recipe.model.preset)
        channels = 1 if isinstance(config, MnistNetConfig) else 3
        size = recipe.data.image_size or (28 if channels == 1 else 224)
        assets = {"classes": list(range(CLASSES)), "channels": channels, "size": size}
        scale = {"mean": [0.0] * channels, "std": [1.0] * channels}
        return Subject(recipe, build_task(recipe, assets | scale))
