"""Sizes of a model, `model.shape`: what a preset can be changed to by key."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from muster.errors import RecipeError
from muster.recipe.section import Positive, Section


class Shape(Section):
    """Sizes in place of the preset's own. A key that the preset's family does not have is refused."""

    layers: Positive | None = Field(
        None,
        description="Blocks. Whisper: of the encoder, and as many of the decoder.",
    )
    width: Positive | None = Field(
        None,
        description="Numbers per token or frame between the blocks. What is not given follows: `heads`, "
        "`hidden`.",
    )
    heads: Positive | None = Field(
        None,
        description="Attention heads; they divide `width`. Default: as many as keep the size of the "
        "preset's heads. Not in lmu-micro and lmu-7m, which have no attention.",
    )
    kv_heads: Positive | None = Field(
        None,
        description="Language models: heads with keys and values of their own; they divide `heads`, and are "
        "as many in GPT-2. Default: the preset's share of `heads`, or the next smaller number that divides.",
    )
    hidden: Positive | None = Field(
        None,
        description="Width of the feed-forward. Default: the preset's multiple of `width` (GPT-2 and Whisper: "
        "4; Llama: 2.7 to 3.5, rounded up to a multiple of 32, from a width of 1024 of 256). lmu-micro and lmu-7m: a "
        "multiple of `width`.",
    )
    positions: Positive | None = Field(
        None,
        description="The longest sequence in tokens. Whisper: of the text, prompt and end included.",
    )
    encoder_layers: Positive | None = Field(
        None, description="Whisper: blocks of the encoder; goes before `layers`."
    )
    decoder_layers: Positive | None = Field(
        None, description="Whisper: blocks of the decoder; goes before `layers`."
    )
    channels: Positive | None = Field(
        None, description="lmu-micro and lmu-7m: channels of the memory in one direction."
    )
    order: Positive | None = Field(None, description="LMU: coefficients per memory channel.")
    theta: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="LMU: frames that the memory spans, of 40 ms (lmu-guide: of 10 ms).",
    )
    kernel: Positive | None = Field(
        None,
        description="lmu-micro and lmu-7m: frames per convolution; odd, except in the -causal presets.",
    )


def check_length(length: int, positions: int, title: str, *, pretrained: bool) -> None:
    """Every token of a sequence needs a position."""
    if length > positions:
        more = "" if pretrained else f", or model.shape.positions to {length}"
        raise RecipeError(
            f"data.sequence_length: {length} is more than the {positions} positions of {title}; set it to "
            f"{positions} or less{more}"
        )
