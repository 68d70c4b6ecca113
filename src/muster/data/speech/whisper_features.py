"""Whisper's log-mel features, in one batched pass on whatever device the waveforms are.

They equal transformers' WhisperFeatureExtractor, whose conventions differ from `features.LogMel`'s:
frames are centred, the filters are Slaney's, and a clip's features depend on its loudest cell.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from muster.data.speech.audio import SAMPLE_RATE
from muster.data.speech.features import MelScale, mel_filters, mel_points, warp_matrix
from muster.data.speech.windows import LONGEST

HOP, WINDOW = 160, 400  # samples
FLOOR = 1e-10
RANGE = 8.0  # decades below the loudest cell of the clip that still count

_KNEE_HZ, _KNEE_MEL, _LOG_STEP = 1000.0, 15.0, 27 / math.log(6.4)


def to_mel(hertz: Tensor) -> Tensor:
    """Slaney's mel scale: linear below 1 kHz, logarithmic above."""
    above = _KNEE_MEL + _LOG_STEP * torch.log(hertz.clamp(min=_KNEE_HZ) / _KNEE_HZ)
    return torch.where(hertz < _KNEE_HZ, hertz * _KNEE_MEL / _KNEE_HZ, above)


def to_hertz(mel: Tensor) -> Tensor:
    above = _KNEE_HZ * torch.exp((mel.clamp(min=_KNEE_MEL) - _KNEE_MEL) / _LOG_STEP)
    return torch.where(mel < _KNEE_MEL, mel * _KNEE_HZ / _KNEE_MEL, above)


SLANEY = MelScale(to_mel, to_hertz, lowest=0.0)


class WhisperLogMel(nn.Module):
    """`[batch, samples]` → `[batch, samples / 160, mels]`, float32."""

    def __init__(self, mels: int = 80) -> None:
        super().__init__()
        self.window: Tensor
        self.filters: Tensor
        self.register_buffer("window", torch.hann_window(WINDOW), persistent=False)
        edges = mel_points(mels + 2, SAMPLE_RATE, SLANEY)
        area = 2 / (edges[2:] - edges[:-2])  # every filter passes as much of white noise
        filters = mel_filters(mels, WINDOW // 2 + 1, SAMPLE_RATE, SLANEY) * area
        self.register_buffer("filters", filters.float(), persistent=False)
        self.centres: Tensor
        self.register_buffer("centres", edges[1:-1].float(), persistent=False)

    @torch.no_grad()
    def forward(self, samples: Tensor, warp: Tensor | None = None) -> Tensor:
        """`samples` are zero-padded to the window, a multiple of 160 samples. `warp` `[batch]`
        stretches each clip's frequencies: 1.1 is a vocal tract a tenth shorter."""
        if samples.shape[1] % HOP:
            raise ValueError(f"{samples.shape[1]} samples are no multiple of {HOP}")
        with torch.autocast(samples.device.type, enabled=False):
            spectrum = torch.stft(
                samples.float(), WINDOW, HOP, window=self.window, return_complex=True
            )[:, :, :-1]
            power = spectrum.real.square() + spectrum.imag.square()
            mel = (power.transpose(1, 2) @ self.filters).clamp(min=FLOOR).log10()
            if warp is not None:
                mel = mel @ warp_matrix(warp, self.centres, SLANEY)
            mel = mel.maximum(mel.amax((1, 2), keepdim=True) - RANGE)
            return (mel + 4) / 4


def preprocessor_config(mels: int) -> dict[str, Any]:
    """preprocessor_config.json: how transformers' WhisperFeatureExtractor makes the same features."""
    samples = round(LONGEST * SAMPLE_RATE)
    return {
        "chunk_length": round(LONGEST),
        "dither": 0.0,
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": mels,
        "hop_length": HOP,
        "n_fft": WINDOW,
        "n_samples": samples,
        "nb_max_frames": samples // HOP,
        "padding_side": "right",
        "padding_value": 0.0,
        "processor_class": "WhisperProcessor",
        "return_attention_mask": False,
        "sampling_rate": SAMPLE_RATE,
    }
