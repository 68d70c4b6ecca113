"""Models by name. Plain modules: they know nothing of ranks, recipes or data."""

from __future__ import annotations

import dataclasses
import difflib

from torch import nn

from muster.models.ctc import LMUCTC, LMUCTCConfig
from muster.models.guide import Guide, GuideConfig

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


PRESETS: dict[str, LMUCTCConfig | GuideConfig] = {
    "lmu-micro": MICRO,
    "lmu-micro-causal": _causal(MICRO),
    "lmu-7m": SEVEN_M,
    "lmu-7m-causal": _causal(SEVEN_M),
    "lmu-guide": GuideConfig(),
}


def build(preset: str, vocab: int, **overrides: object) -> nn.Module:
    """The preset's model for a vocabulary, any field of its config replaced by name."""
    if preset not in PRESETS:
        near = difflib.get_close_matches(preset, PRESETS, n=2, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"no preset {preset!r}{hint} Known: {', '.join(PRESETS)}")
    config = PRESETS[preset]
    known = [field.name for field in dataclasses.fields(config)]
    for name in overrides:
        if name not in known:
            raise ValueError(f"{preset} has no field {name!r}; it has {', '.join(known)}")
    config = dataclasses.replace(config, vocab=vocab, **overrides)  # type: ignore[arg-type]
    return LMUCTC(config) if isinstance(config, LMUCTCConfig) else Guide(config)
