"""Models by name. Plain modules: they know nothing of ranks, recipes or data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.models.configs import (
    DecoderConfig,
    LMUAttentionConfig,
    LMUCTCConfig,
    MnistNetConfig,
    ResNetConfig,
    WhisperConfig,
)
from muster.models.presets import PRESETS, check_preset, configure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from muster.models.shape import Size

__all__ = ["PRESETS", "build", "check_preset", "configure"]


def build(
    preset: str,
    vocab: int | None = None,
    shape: Mapping[str, Size] | None = None,
    **overrides: object,
) -> nn.Module:
    """The preset's model, in another `shape`, any field of its config replaced by name. Models of
    images have no `vocab`; they have `classes`."""
    from muster.models import ctc, decoder, lmu_attention, resnet
    from muster.models.whisper.model import Whisper

    if vocab is not None:
        overrides["vocab"] = vocab
    match configure(preset, shape, **overrides):
        case LMUCTCConfig() as config:
            return ctc.LMUCTC(config)
        case LMUAttentionConfig() as config:
            return lmu_attention.LMUAttentionCTC(config)
        case DecoderConfig() as config:
            return decoder.Decoder(config)
        case WhisperConfig() as config:
            return Whisper(config)
        case ResNetConfig() as config:
            return resnet.ResNet(config)
        case MnistNetConfig() as config:
            return resnet.MnistNet(config)
