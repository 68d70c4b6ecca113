"""Workloads. Adding one is adding a file here, a line in `muster.workloads` and a recipe."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from muster.errors import DataError
from muster.recipe.own_task import parse
from muster.recipe.schema import Recipe
from muster.tasks.base import Task
from muster.workloads import WORKLOADS


def build_task(recipe: Recipe, assets: dict[str, Any] | None = None) -> Task:
    """The recipe's workload. `assets`, from a checkpoint, spare it from looking at training data."""
    own = parse(recipe.task)
    if own is not None:
        from muster.tasks.own import build_own

        return build_own(own, recipe, assets)
    where = WORKLOADS[recipe.task].where
    if recipe.task == "speech-ctc" and recipe.model.pretrained is not None:
        where = "muster.tasks.speech_encoder:SpeechEncoder"
    if recipe.task == "causal-lm" and _is_chat(recipe, assets):
        where = "muster.tasks.chat:ChatLM"
    module, name = where.split(":")
    task: Task = getattr(import_module(module), name)(recipe, assets)
    return task


def _is_chat(recipe: Recipe, assets: dict[str, Any] | None) -> bool:
    """As the checkpoint was trained; of a new run, as its data are."""
    if assets is not None:
        return "chat_template" in assets
    from muster.data import corpus
    from muster.data.text.conversations import are_chat

    data = recipe.data
    try:
        named = (data.sources, data.validation, data.test)
        files = corpus.split_files(*named, "train", data.max_parquet_files, "text")
    except DataError:  # whoever opens the data says what is wrong with it
        files = []
    return are_chat(data.format, data.text_column, files)
