"""A checkpoint continues only the maths it was made with: what must not have changed, and says so."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from muster.errors import CheckpointError
from muster.recipe.schema import Recipe
from muster.train.checkpoint import Saved

MUST_MATCH = (
    "task",
    "seed",
    "model.preset",
    "model.pretrained",
    "model.vocab_size",
    "model.lora",
    "model.freeze_encoder",
    "model.norm",
    "data.train",
    "data.max_parquet_files",
    "data.audio_column",
    "data.text_column",
    "data.image_column",
    "data.label_column",
    "data.sequence_length",
    "data.isolate_documents",
    "data.image_size",
    "data.sample_rate",
    "data.mels",
    "data.normalize",
    "data.spec_augment",
    "data.tokenizer",
    "data.lowercase",
    "data.unknown_characters",
    "data.min_seconds",
    "data.max_seconds",
    "data.window",
    "data.buckets",
    "data.long_clips",
    "data.long_texts",
    "data.language",
    "data.speech_task",
    "data.timestamps",
    "data.shuffle",
    "data.pool_batches",
    "training.global_batch_size",
)


def refuse_other_recipe(saved: Saved, recipe: dict[str, Any]) -> None:
    """A checkpoint continues only the maths it was made with; where it runs is free to change."""
    document = json.loads((saved.path / "recipe.json").read_text())
    with suppress(ValueError):  # keys that were added since have their defaults; else as it stands
        document = Recipe.model_validate(document).as_dict()
    for key in MUST_MATCH:
        before, now = _get(document, key), _get(recipe, key)
        if key == "data.lowercase":  # what `auto` means
            before, now = (
                recipe["task"] == "speech-ctc" if x == "auto" else x for x in (before, now)
            )
        if before != now:
            raise CheckpointError(
                f"{saved.path} was trained with {key}={before!r}, but this recipe has {key}={now!r}; "
                "use the same value, or start a new run: muster train RECIPE"
            )


def refuse_other_data(saved: Saved, data: dict[str, Any]) -> None:
    """The place in the data is a step number: it means something only in the very same data."""
    theirs = json.loads((saved.path / "assets.json").read_text()).get("data", data)
    if theirs.get("shuffle", data["shuffle"]) != data["shuffle"]:
        raise CheckpointError(
            f"{saved.path} was trained with data.shuffle={theirs['shuffle']}, and this run has "
            f"{data['shuffle']}, which `auto` takes by data.cache_gib; set data.shuffle="
            f"{theirs['shuffle']}"
        )
    if any(theirs[key] != data[key] for key in ("samples", "lengths")):
        raise CheckpointError(
            f"{saved.path} was trained on {theirs['samples']} samples, and data.train now holds "
            f"{data['samples']} with other lengths; restore the data, or start a new run"
        )


def _get(document: dict[str, Any], key: str) -> Any:
    value: Any = document
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
