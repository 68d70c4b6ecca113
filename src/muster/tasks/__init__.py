"""Workloads. Adding one is adding a file here, a line in `TASKS` and a recipe."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from muster.recipe.schema import Recipe
from muster.tasks.base import Task

TASKS = {
    "speech-ctc": "muster.tasks.speech_ctc:SpeechCTC",
    "speech-seq2seq": "muster.tasks.speech_seq2seq:SpeechSeq2Seq",
    "causal-lm": "muster.tasks.causal_lm:CausalLM",
    "image-classification": "muster.tasks.image_classification:ImageClassification",
}


def build_task(recipe: Recipe, assets: dict[str, Any] | None = None) -> Task:
    """The recipe's workload. `assets`, from a checkpoint, spare it from looking at training data."""
    module, name = TASKS[recipe.task].split(":")
    task: Task = getattr(import_module(module), name)(recipe, assets)
    return task
