"""Whisper's text normalisers, so that word error rates compare with published ones.

They are transformers' own: what counts as the same word is a convention, not something to improve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from muster.errors import RecipeError
from muster.reading import json_file
from muster.reading.text import in_one_line

FILE = "normalizer.json"


def make_normaliser(
    kind: Literal["whisper", "basic", "none"], spelling: Mapping[str, str] | None = None
) -> Callable[[str], str]:
    """What `evaluation.normalizer` asks for. `spelling` (British -> American) is for `whisper`."""
    if kind == "none":
        return str
    try:
        from transformers.models.whisper import english_normalizer
    except ImportError as error:
        raise RecipeError(
            f"evaluation.normalizer: {kind} is a normaliser of transformers ({error}); install it "
            "with `pip install transformers`, or set evaluation.normalizer=none"
        ) from None
    normalise: Callable[[str], str]
    if kind == "whisper":
        normalise = english_normalizer.EnglishTextNormalizer(dict(spelling or {}))
    else:
        normalise = english_normalizer.BasicTextNormalizer()
    return lambda text: normalise(text).strip()


def read_spelling(folder: Path) -> dict[str, str] | None:
    """The spellings beside a pretrained model, where it has them."""
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        spelling = json_file.read(file)
        return {str(word): str(american) for word, american in spelling.items()}
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"model.pretrained: {file} is damaged ({in_one_line(error, 300)}); expected one JSON object of spellings. "
            "Fetch it again, or remove it to compare words as they are spelt"
        ) from None
