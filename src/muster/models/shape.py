"""Sizes given by key (`model.shape`) in place of a preset's own, without torch.

What depends on a size and is not given follows from it: the feed-forward keeps its ratio to the width,
each head its size, key and value heads their share of the heads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from muster.errors import RecipeError
from muster.models.configs import (
    DecoderConfig,
    LMUAttentionConfig,
    LMUCTCConfig,
    WhisperConfig,
)

Size = int | float
AnyConfig = TypeVar("AnyConfig")

# The keys of each family, and the fields of its config that they set.
KEYS: dict[type, dict[str, tuple[str, ...]]] = {
    DecoderConfig: {
        key: (key,) for key in ("layers", "width", "heads", "kv_heads", "hidden", "positions")
    },
    WhisperConfig: {
        "layers": ("encoder_layers", "decoder_layers"),
        "encoder_layers": ("encoder_layers",),
        "decoder_layers": ("decoder_layers",),
        "width": ("width",),
        "heads": ("encoder_heads", "decoder_heads"),
        "hidden": ("encoder_hidden", "decoder_hidden"),
        "positions": ("target_positions",),
    },
    LMUCTCConfig: {
        "layers": ("blocks",),
        "width": ("width",),
        "hidden": ("ff_mult",),
        "channels": ("channels",),
        "order": ("order",),
        "theta": ("theta_frames",),
        "kernel": ("kernel",),
    },
    LMUAttentionConfig: {
        "layers": ("blocks",),
        "width": ("width",),
        "heads": ("heads",),
        "order": ("order",),
        "theta": ("theta",),
    },
}


def reshape(preset: str, config: AnyConfig, shape: Mapping[str, Size]) -> AnyConfig:
    """`config`, of `preset`, with the sizes in `shape` and what follows from them."""
    known = KEYS.get(type(config), {})
    if not shape:
        return config
    if not known:
        raise RecipeError(f"model.shape: does not apply to {preset}; leave it out")
    for key in shape:
        if key not in known:
            raise RecipeError(
                f"model.shape.{key}: {preset} has no such size; it has {', '.join(known)}"
            )
    sizes = dict(shape)
    match config:
        case DecoderConfig():
            sizes |= _decoder(preset, config, shape)
        case WhisperConfig():
            sizes |= _whisper(preset, config, shape)
        case LMUCTCConfig():
            sizes |= _lmu(preset, config, shape)
        case LMUAttentionConfig():
            sizes["heads"] = _heads(preset, config.width, config.heads, shape)
    fields = {field: sizes[key] for key in known if key in sizes for field in known[key]}
    if isinstance(config, DecoderConfig):
        fields["head_size"] = 0  # again width / heads
    return dataclasses.replace(config, **fields)  # type: ignore[type-var]


def _decoder(preset: str, config: DecoderConfig, shape: Mapping[str, Size]) -> dict[str, Size]:
    width, rotary = int(shape.get("width", config.width)), config.position == "rotary"
    heads = _heads(preset, config.width, config.heads, shape, even=rotary)
    hidden = width * config.hidden / config.width
    if config.activation == "swiglu" and width != config.width:
        unit = 32 if width < 1024 else 256
        hidden = unit * math.ceil(hidden / unit)
    return {
        "heads": heads,
        "kv_heads": _kv_heads(preset, config, heads, shape),
        "hidden": shape.get("hidden", round(hidden)),
    }


def _kv_heads(preset: str, config: DecoderConfig, heads: int, shape: Mapping[str, Size]) -> int:
    """As many heads to one key-value head as in the preset, or more where that does not divide."""
    options = _divisors(heads)
    share = config.heads // config.kv_heads
    wanted = int(shape.get("kv_heads", max(n for n in options if n <= max(1, heads // share))))
    if config.position == "learned" and wanted != heads:
        raise RecipeError(
            f"model.shape.kv_heads: {wanted}, but {preset} has a key and a value for each of its "
            f"{heads} heads; leave it out, or build on a Llama preset"
        )
    if wanted not in options:
        raise RecipeError(
            f"model.shape.kv_heads: {wanted} does not divide the {heads} heads; use "
            f"{_either(options)}"
        )
    return wanted


def _whisper(preset: str, config: WhisperConfig, shape: Mapping[str, Size]) -> dict[str, Size]:
    width = int(shape.get("width", config.width))
    unit = math.lcm(2, int(shape.get("heads", config.width // config.encoder_heads)))
    if width % 2 or width < 4:
        raise RecipeError(
            f"model.shape.width: {width}; Whisper's positions are sines and cosines, two of each at least: "
            f"use {unit * max(-(-4 // unit), round(width / unit))}"
        )
    hidden = width * config.encoder_hidden // config.width
    return {
        "heads": _heads(preset, config.width, config.encoder_heads, shape),
        "hidden": shape.get("hidden", hidden),
    }


def _lmu(preset: str, config: LMUCTCConfig, shape: Mapping[str, Size]) -> dict[str, Size]:
    width = int(shape.get("width", config.width))
    hidden = int(shape.get("hidden", width * config.ff_mult))
    if hidden % width:
        lower = width * max(1, hidden // width)
        raise RecipeError(
            f"model.shape.hidden: {hidden} is not a multiple of the width {width}; use {lower} or "
            f"{lower + width}"
        )
    kernel = int(shape.get("kernel", config.kernel))
    if not config.causal and kernel % 2 == 0:
        raise RecipeError(
            f"model.shape.kernel: {kernel} is even, and the convolutions of {preset} are centred; use "
            f"{kernel - 1} or {kernel + 1}"
        )
    return {"hidden": hidden // width}


def _heads(
    preset: str, width: int, heads: int, shape: Mapping[str, Size], *, even: bool = False
) -> int:
    """The heads asked for, or as many as keep the size of `preset`'s, which has `heads` in `width`."""
    size, wide = width // heads, int(shape.get("width", width))
    asked = int(shape["heads"]) if "heads" in shape else None
    options = [n for n in _divisors(wide) if not (even and (wide // n) % 2)]
    if asked is None and wide % size == 0:
        return wide // size
    if asked in options:
        return asked
    unit = 2 * asked if even and asked else math.lcm(2, asked or size)
    width = unit * max(1, round(wide / unit))
    if not options:
        raise RecipeError(
            f"model.shape.width: {wide} is odd, and rotary positions turn pairs of numbers; use {width}"
        )
    if asked is None:
        problem = (
            f"the width {wide} is not a multiple of {size}, the size of a head in {preset}, so heads cannot "
            "follow from it"
        )
    elif wide % asked:
        problem = f"{asked} does not divide the width {wide}"
    else:
        problem = (
            f"{asked} heads in a width of {wide} have {wide // asked} numbers each, and rotary positions need "
            "an even number"
        )
    near = sorted(options, key=lambda n: abs(math.log(n * size / wide)))[:4]
    raise RecipeError(
        f"model.shape.heads: {problem}; use {_either(sorted(near))}, or model.shape.width={width}"
    )


def _divisors(number: int) -> Sequence[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _either(numbers: Iterable[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last
