"""The recipe that a user names: shipped, a file, or a model with the default recipe of its family.

Does not import torch, so that a wrong name or key is refused at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from muster.errors import RecipeError
from muster.models.configs import (
    DecoderConfig,
    LMUAttentionConfig,
    LMUCTCConfig,
    MnistNetConfig,
    ResNetConfig,
    WhisperConfig,
)
from muster.models.presets import PRESETS, check_preset
from muster.recipe.load import Source, list_recipes, load
from muster.recipe.schema import Recipe

LONGEST = 4096  # default maximum sequence length in tokens


def find_recipe(name: Source, overrides: Sequence[str] = ()) -> Recipe:
    """With these overrides. Its data may be missing, since a plan needs none."""
    try:
        source, changes = as_recipe(name) if isinstance(name, str) else (name, [])
        recipe = _load(source, changes, overrides)
    except RecipeError as error:
        if "no such recipe" in str(error):
            raise RecipeError(f"{error}. Or name a model: {', '.join(PRESETS)}") from None
        raise
    if recipe.model.pretrained is None and recipe.model.config is None:
        check_preset(recipe.task, recipe.model.preset, recipe.model.sizes)
    return recipe


def as_recipe(name: str) -> tuple[str, list[str]]:
    """The recipe for a name, and the overrides that go with it."""
    recipes = [recipe for recipe, _ in list_recipes()]
    if name in PRESETS and name not in recipes:
        return _around(name)
    return name, []


def _around(preset: str) -> tuple[str, list[str]]:
    """The default recipe of a model, and its overrides."""
    change = [f"model.preset={preset}"]
    match PRESETS[preset]:
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


def _load(name: Source, changes: list[str], overrides: Sequence[str]) -> Recipe:
    given = [*changes, *overrides]
    try:
        return load(name, given)
    except RecipeError as error:
        words = str(error)
    if words.startswith("model.pretrained: has no value"):
        raise RecipeError(
            f"{name if isinstance(name, str) else 'the recipe'}: has no model size yet; give model.pretrained=FOLDER, or plan for a preset, "
            "such as `muster plan whisper-small`"
        )
    return load(name, [*given, "data.train=nowhere"])  # raises any other error
