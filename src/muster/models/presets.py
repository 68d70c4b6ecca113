"""Sizes of models by name, without torch."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping

from muster.errors import RecipeError
from muster.models.configs import (
    DecoderConfig,
    LMUAttentionConfig,
    LMUCTCConfig,
    MnistNetConfig,
    ResNetConfig,
    WhisperConfig,
)
from muster.models.shape import Size, reshape

Config = (
    LMUCTCConfig
    | LMUAttentionConfig
    | DecoderConfig
    | WhisperConfig
    | ResNetConfig
    | MnistNetConfig
)

MICRO = LMUCTCConfig(
    width=128, blocks=4, channels=16, order=8, theta_frames=48, kernel=9, ff_mult=3
)
SEVEN_M = LMUCTCConfig(
    width=256, blocks=8, channels=24, order=16, theta_frames=96, kernel=15, ff_mult=4
)


def _causal(config: LMUCTCConfig) -> LMUCTCConfig:
    """Both directions' channels listen to the past: the same size, nothing ahead."""
    return dataclasses.replace(
        config, channels=2 * config.channels, bidirectional=False, causal=True
    )


def _gpt(layers: int, width: int, heads: int, positions: int = 1024) -> DecoderConfig:
    return DecoderConfig(50257, layers, width, heads, hidden=4 * width, positions=positions)


def _llama(
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    *,
    vocab: int = 32000,
    positions: int = 4096,
    rope_theta: float = 10_000.0,
) -> DecoderConfig:
    return DecoderConfig(
        vocab,
        layers,
        width,
        heads,
        hidden,
        kv_heads=kv_heads,
        positions=positions,
        position="rotary",
        norm="rms",
        activation="swiglu",
        bias=False,
        qkv_bias=False,
        tied=False,
        rope_theta=rope_theta,
    )


def _whisper(
    layers: int, width: int, heads: int, *, vocab: int = 51865, mels: int = 80
) -> WhisperConfig:
    encoder = decoder = (layers, heads, 4 * width)
    return WhisperConfig(vocab, width, *encoder, *decoder, mels=mels)


PRESETS: dict[str, Config] = {
    "lmu-micro": MICRO,
    "lmu-micro-causal": _causal(MICRO),
    "lmu-7m": SEVEN_M,
    "lmu-7m-causal": _causal(SEVEN_M),
    "lmu-guide": LMUAttentionConfig(),
    "gpt2-micro": _gpt(4, 128, 4),
    "gpt2": _gpt(12, 768, 12),
    "gpt2-medium": _gpt(24, 1024, 16),
    "gpt2-large": _gpt(36, 1280, 20),
    "gpt2-xl": _gpt(48, 1600, 25),
    "llama-micro": _llama(4, 128, 4, 2, 352),
    "llama-1b": _llama(22, 2048, 32, 4, 5632, positions=2048),
    "llama-3b": _llama(26, 3200, 32, 32, 8640, positions=2048),
    "llama-7b": _llama(32, 4096, 32, 32, 11008),
    "llama-3-8b": _llama(
        32, 4096, 32, 8, 14336, vocab=128256, positions=8192, rope_theta=500_000.0
    ),
    "llama-70b": _llama(80, 8192, 64, 8, 28672),
    "whisper-micro": _whisper(2, 128, 4, vocab=4096),
    "whisper-tiny": _whisper(4, 384, 6),
    "whisper-base": _whisper(6, 512, 8),
    "whisper-small": _whisper(12, 768, 12),
    "whisper-medium": _whisper(24, 1024, 16),
    "whisper-large-v3": _whisper(32, 1280, 20, vocab=51866, mels=128),
    "mnist-net": MnistNetConfig(),
    "resnet-18": ResNetConfig(18),
    "resnet-50": ResNetConfig(50),
}


OF_TASK: dict[str, tuple[str, tuple[type, ...]]] = {  # what each trains, and its configs
    "speech-ctc": ("CTC model", (LMUCTCConfig, LMUAttentionConfig)),
    "speech-seq2seq": ("Whisper", (WhisperConfig,)),
    "causal-lm": ("language model", (DecoderConfig,)),
    "image-classification": ("image model", (ResNetConfig, MnistNetConfig)),
}
PRETRAINED = (
    "speech-ctc",
    "speech-seq2seq",
    "causal-lm",
)  # tasks that also take a Hugging Face folder


def check_preset(task: str, preset: str, shape: Mapping[str, Size] | None = None) -> None:
    """Refuse what is no preset, or one of another task, and a `shape` that it cannot have. A task of the
    user's own builds its model by itself."""
    if task not in OF_TASK:
        return
    kind, configs = OF_TASK[task]
    known = [name for name, config in PRESETS.items() if isinstance(config, configs)]
    if preset in known:
        reshape(preset, PRESETS[preset], shape or {})
        return
    near = difflib.get_close_matches(preset, known, n=1)
    hint = f"; nearest is {near[0]}" if near else ""
    other = ", or pretrained weights by model.pretrained" if task in PRETRAINED else ""
    raise RecipeError(
        f"model.preset: {preset!r} is no {kind}{hint}; {task} takes {', '.join(known)}{other}"
    )


def configure(preset: str, shape: Mapping[str, Size] | None = None, **overrides: object) -> Config:
    """The preset's config, in another `shape`, any of its fields replaced by name."""
    if preset not in PRESETS:
        near = difflib.get_close_matches(preset, PRESETS, n=2, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise ValueError(f"no preset {preset!r}{hint} Known: {', '.join(PRESETS)}")
    config = reshape(preset, PRESETS[preset], shape or {})
    known = [field.name for field in dataclasses.fields(config)]
    for name in overrides:
        if name not in known:
            raise ValueError(f"{preset} has no field {name!r}; it has {', '.join(known)}")
    return dataclasses.replace(config, **overrides)  # type: ignore[arg-type]
