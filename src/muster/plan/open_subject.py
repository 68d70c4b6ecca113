"""Opens what a user names: a recipe, a file, or a model; with or without its data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from muster import models
from muster.errors import DataError, RecipeError
from muster.models.attention import DecoderConfig
from muster.models.ctc import LMUCTCConfig
from muster.models.lmu_attention import LMUAttentionConfig
from muster.models.resnet import MnistNetConfig, ResNetConfig
from muster.models.whisper.model import WhisperConfig
from muster.plan.subject import Subject
from muster.recipe.load import list_recipes, load
from muster.recipe.schema import Recipe
from muster.tasks import build_task

LONGEST = 4096  # default maximum sequence length in tokens
CLASSES = 1000  # of an image dataset that is not available
EMBEDDED = {
    "causal-lm": "embedded:python-source",
    "speech-ctc": "embedded:spoken-numbers",
    "speech-seq2seq": "embedded:spoken-numbers",
}


def as_recipe(name: str) -> tuple[str, list[str]]:
    """The recipe for a name, and the overrides that go with it."""
    recipes = [recipe for recipe, _ in list_recipes()]
    if name in models.PRESETS and name not in recipes:
        return _around(name)
    return name, []


def open_subject(name: str, overrides: Sequence[str] = ()) -> Subject:
    """Of a shipped recipe, a recipe file, or a model preset with the default recipe of its family."""
    try:
        return _subject(_load(*as_recipe(name), overrides))
    except RecipeError as error:
        if "no such recipe" in str(error):
            raise RecipeError(f"{error}. Or name a model: {', '.join(models.PRESETS)}") from None
        raise


def _around(preset: str) -> tuple[str, list[str]]:
    """The default recipe of a model, and its overrides."""
    change = [f"model.preset={preset}"]
    match models.PRESETS[preset]:
        case DecoderConfig() as config:
            family = "llama-1b" if config.position == "rotary" else "gpt2"
            length = min(config.positions, LONGEST)
            return family, [
                *change,
                f"model.vocab_size={config.vocab}",
                f"data.sequence_length={length}",
            ]
        case WhisperConfig():
            return "whisper-micro", [*change, "data.window=30"]
        case ResNetConfig():
            return "resnet18", change
        case MnistNetConfig():
            return "mnist", change
        case LMUAttentionConfig():
            return "speech-guide", change
        case LMUCTCConfig():
            return "speech-7m", change
    raise AssertionError(preset)


def _load(name: str, changes: list[str], overrides: Sequence[str]) -> Recipe:
    """A plan needs no data, but the size of the model."""
    given = [*changes, *overrides]
    try:
        return load(name, given)
    except RecipeError as error:
        words = str(error)
    if words.startswith("model.pretrained: has no value"):
        raise RecipeError(
            f"{name}: has no model size yet; give model.pretrained=FOLDER, or plan for a preset, "
            "such as `muster plan whisper-small`"
        )
    return load(name, [*given, "data.train=nowhere"])  # raises any other error


def _subject(recipe: Recipe) -> Subject:
    if recipe.task == "image-classification":
        return _images(recipe)
    if recipe.data.train == "nowhere":
        data = recipe.data.model_copy(update={"train": EMBEDDED[recipe.task]})
        recipe = recipe.model_copy(update={"data": data})
    task = build_task(recipe)
    if recipe.task == "causal-lm":
        return Subject(recipe, task)
    try:
        return Subject(recipe, task, task.source("train"))
    except DataError:
        return Subject(recipe, task)


def _images(recipe: Recipe) -> Subject:
    """The number of outputs is the number of classes in the data."""
    try:
        task = build_task(recipe)
        return Subject(recipe, task, task.source("train"))
    except DataError:
        config: Any = models.PRESETS.get(recipe.model.preset)
        channels = 1 if isinstance(config, MnistNetConfig) else 3
        size = recipe.data.image_size or (28 if channels == 1 else 224)
        assets = {"classes": list(range(CLASSES)), "channels": channels, "size": size}
        scale = {"mean": [0.0] * channels, "std": [1.0] * channels}
        return Subject(recipe, build_task(recipe, assets | scale))
