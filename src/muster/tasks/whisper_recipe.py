"""What a recipe says of its Whisper: sizes, windows, the normaliser, and what does not fit together."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Literal

from muster import models
from muster.data.speech import windows
from muster.data.speech.whisper_text import WhisperTokens
from muster.errors import RecipeError
from muster.models.configs import WhisperConfig
from muster.models.whisper import folder as whisper_folder
from muster.models.whisper.folder import Generation
from muster.reading.files import expanded
from muster.recipe.schema import Recipe


def config_for(recipe: Recipe, folder: Path | None) -> WhisperConfig:
    """Of the pretrained `folder`, of `model.config`, or of the preset."""
    wanted = recipe.model
    if folder is not None:
        config = whisper_folder.read_config(folder)
        return dataclasses.replace(config, dropout=wanted.dropout)
    if wanted.config is not None:
        config = whisper_folder.read_config(expanded(wanted.config), "model.config")
        return dataclasses.replace(config, dropout=wanted.dropout)
    models.check_preset(recipe.task, wanted.preset, wanted.sizes)
    found = models.configure(wanted.preset, wanted.sizes, dropout=wanted.dropout)
    assert isinstance(found, WhisperConfig)
    return found


def longest_window(config: WhisperConfig) -> float:
    """Seconds that the encoder has positions for."""
    return config.source_positions / windows.TICKS_PER_SECOND


def refuse_misfits(
    recipe: Recipe, config: WhisperConfig, tokens: WhisperTokens, generation: Generation
) -> None:
    if tokens.size > config.vocab:
        raise RecipeError(
            f"data.tokenizer: it has {tokens.size} ids, the model's embedding only "
            f"{config.vocab} rows; use the model's tokenizer"
        )
    suppressed = (*generation.suppress, *generation.suppress_first)
    if max(suppressed, default=0) >= config.vocab:
        raise RecipeError(
            f"model.pretrained: generation_config.json suppresses token {max(suppressed)}, but the "
            f"model has only {config.vocab}; correct it there"
        )
    longest = longest_window(config)
    asked = {"data.window": recipe.data.window, "evaluation.window": recipe.evaluation.window}
    for key, seconds in asked.items():
        if isinstance(seconds, str):
            continue
        ticks = seconds * windows.TICKS_PER_SECOND
        if seconds > longest or not math.isclose(ticks, round(ticks)):
            raise RecipeError(
                f"{key}: {seconds} s; the encoder takes multiples of 0.02 s up to "
                f"{longest:g} s, or `bucket`"
            )


def normaliser_for(recipe: Recipe, tokens: WhisperTokens) -> Literal["whisper", "basic", "none"]:
    asked = recipe.evaluation.normalizer
    if asked != "auto":
        return asked
    language = recipe.data.language or ("" if tokens.multilingual else "en")
    return "whisper" if language.lower() in ("en", "english") else "basic"
