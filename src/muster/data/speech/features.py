"""Waveforms to log-mel features, and SpecAugment: batched, on whatever device the batch is.

Frames are causal: frame t sees the `WINDOW` samples that end at (t + 1)·`HOP`. What follows a clip
is zero however long its batch is padded, so a clip's features do not depend on its neighbours, and
the same frames come out when the samples arrive one by one (`StreamingLogMel`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from muster.data.batches import keyed_generator
from muster.data.speech.audio import SAMPLE_RATE

WINDOW_S, HOP_S = 0.025, 0.010
FLOOR = 1e-6
FIXED_MEAN, FIXED_SCALE = -6.0, 4.0  # of log-mel energies of speech at ordinary levels


def to_mel(hertz: Tensor) -> Tensor:
    """The HTK mel scale."""
    return 2595 * torch.log10(1 + hertz / 700)


def to_hertz(mel: Tensor) -> Tensor:
    return 700 * (10 ** (mel / 2595) - 1)


@dataclass(frozen=True)
class MelScale:
    to_mel: Callable[[Tensor], Tensor]
    to_hertz: Callable[[Tensor], Tensor]
    lowest: float  # Hz, where the first filter begins


HTK = MelScale(to_mel, to_hertz, lowest=20.0)


def mel_points(count: int, sample_rate: int, scale: MelScale = HTK) -> Tensor:
    """`count` frequencies in Hz, evenly spaced in mel from the scale's lowest to Nyquist."""
    ends = scale.to_mel(torch.tensor([scale.lowest, sample_rate / 2], dtype=torch.float64))
    return scale.to_hertz(
        torch.linspace(float(ends[0]), float(ends[1]), count, dtype=torch.float64)
    )


def mel_filters(mels: int, bins: int, sample_rate: int, scale: MelScale = HTK) -> Tensor:
    """Triangular filters `[bins, mels]` of height 1, in float64."""
    edges = mel_points(mels + 2, sample_rate, scale)
    frequencies = torch.linspace(0, sample_rate / 2, bins, dtype=torch.float64)[:, None]
    rising = (frequencies - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies) / (edges[2:] - edges[1:-1])
    return torch.minimum(rising, falling).clamp(min=0)


def warp_matrix(factor: Tensor, centres: Tensor, scale: MelScale = HTK) -> Tensor:
    """`[batch, mels, mels]`: the channel at f Hz gets the energy at f ÷ factor, interpolated.
    `centres` `[mels]` are the channels' frequencies, on the device of `factor`."""
    mels, grid = len(centres), scale.to_mel(centres)
    spacing = grid[1] - grid[0]
    source = (
        scale.to_mel(centres / factor[:, None]) - grid[0]
    ) / spacing  # [batch, mels], channels
    source = source.clamp(0, mels - 1)
    channel = torch.arange(mels, device=factor.device)
    return (1 - (channel[None, :, None] - source[:, None, :]).abs()).clamp(min=0)


class LogMel(nn.Module):
    """`[batch, samples]` and lengths → `[batch, frames, mels]` and lengths, padding zeroed."""

    def __init__(
        self,
        sample_rate: int = SAMPLE_RATE,
        mels: int = 80,
        normalize: Literal["clip", "fixed"] = "clip",
    ) -> None:
        super().__init__()
        self.sample_rate = sample_rate
        self.hop = round(sample_rate * HOP_S)
        self.window_size = round(sample_rate * WINDOW_S)
        self.fft_size = 1 << (self.window_size - 1).bit_length()
        self.normalize = normalize
        self.window: Tensor
        self.filters: Tensor
        self.register_buffer("window", torch.hann_window(self.window_size), persistent=False)
        filters = mel_filters(mels, self.fft_size // 2 + 1, sample_rate)
        self.register_buffer("filters", filters.float(), persistent=False)
        self.centres: Tensor
        centres = mel_points(mels + 2, sample_rate)[1:-1]
        self.register_buffer("centres", centres.float(), persistent=False)

    def frames(self, samples: Tensor) -> Tensor:
        """How many frames `samples` samples give."""
        return (samples + self.hop - 1) // self.hop

    def energies(self, framed: Tensor) -> Tensor:
        """Windows `[..., window]` → log-mel energies `[..., mels]`, always in float32."""
        with torch.autocast(framed.device.type, enabled=False):
            spectrum = torch.fft.rfft(framed * self.window, n=self.fft_size)
            power = spectrum.real.square() + spectrum.imag.square()
            return torch.log(power @ self.filters + FLOOR)

    @torch.no_grad()
    def forward(
        self, samples: Tensor, lengths: Tensor, warp: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`warp` `[batch]` stretches each clip's frequencies: 1.1 is a vocal tract a tenth shorter."""
        frames = self.frames(lengths)
        total = math.ceil(samples.shape[1] / self.hop)
        right = total * self.hop - samples.shape[1]
        padded = F.pad(samples, (self.window_size - self.hop, right))
        mel = self.energies(padded.unfold(1, self.window_size, self.hop))
        if warp is not None:
            mel = mel @ warp_matrix(warp, self.centres)
        mask = torch.arange(total, device=mel.device)[None] < frames[:, None]
        return self.normalise(mel, mask), frames

    def normalise(self, mel: Tensor, mask: Tensor) -> Tensor:
        weight = mask[..., None].to(mel.dtype)
        if self.normalize == "fixed":
            return (mel - FIXED_MEAN) / FIXED_SCALE * weight
        count = weight.sum(1, keepdim=True).clamp(min=1)
        mean = (mel * weight).sum(1, keepdim=True) / count
        centred = (mel - mean) * weight
        variance = centred.square().sum(1, keepdim=True) / count
        return centred / (variance + 1e-2).sqrt()


class StreamingLogMel:
    """The same frames from samples that arrive in chunks. Needs `normalize: fixed`."""

    def __init__(self, logmel: LogMel) -> None:
        if logmel.normalize != "fixed":
            raise ValueError(
                "data.normalize is 'clip', which needs the whole clip; streaming needs 'fixed'"
            )
        self.logmel = logmel
        self.tail = torch.zeros(logmel.window_size - logmel.hop)

    def push(self, samples: Tensor, last: bool = False) -> Tensor:
        """`[n]` new samples → `[frames, mels]` frames completed by them."""
        buffer = torch.cat([self.tail, samples])
        fresh = len(buffer) - (self.logmel.window_size - self.logmel.hop)
        if last:
            buffer = F.pad(buffer, (0, -fresh % self.logmel.hop))
            fresh += -fresh % self.logmel.hop
        count = fresh // self.logmel.hop
        self.tail = buffer[count * self.logmel.hop :]
        if count == 0:
            return torch.zeros(0, self.logmel.filters.shape[1])
        framed = buffer.unfold(0, self.logmel.window_size, self.logmel.hop)[:count]
        return (self.logmel.energies(framed) - FIXED_MEAN) / FIXED_SCALE


Masks = NDArray[np.float32]


@dataclass(frozen=True)
class Augmentation:
    """Limits of SpecAugment: frequency masks, time masks, and frequency warp."""

    freq_masks: int
    freq_width: int  # channels
    time_masks: int
    time_width: float  # share of the clip
    warp: float  # 0.1 draws factors from 0.9 to 1.1


def draw(key: tuple[int, ...], mels: int, options: Augmentation) -> tuple[Masks, Masks, float]:
    """One sample's masked bands (in channels), masked stretches (shares of the clip) and warp.

    `key` is (seed, epoch, sample id) and nothing else, so the draw does not depend on the rank.
    """
    rng = keyed_generator(*key)
    widths = rng.integers(0, options.freq_width + 1, size=options.freq_masks)
    starts = rng.integers(0, np.maximum(mels - widths, 1))
    spans = rng.uniform(0, options.time_width, size=options.time_masks)
    begins = rng.uniform(0, 1 - spans)
    bands = np.stack([starts, starts + widths], axis=-1).astype(np.float32)
    stretches = np.stack([begins, begins + spans], axis=-1).astype(np.float32)
    return bands, stretches, float(rng.uniform(1 - options.warp, 1 + options.warp))


def apply_masks(features: Tensor, frames: Tensor, bands: Tensor, stretches: Tensor) -> Tensor:
    """Set masked cells to zero. One pass, no loop over clips.

    Zero is each channel's mean over the clip where features are normalised by clip. In fixed ones
    and in Whisper's it is one level for all clips, amid those of speech.

    features `[batch, time, mel]`, bands `[batch, n, 2]` in channels, stretches `[batch, m, 2]` in
    shares of the clip.
    """
    mel = torch.arange(features.shape[2], device=features.device)
    in_band = (mel >= bands[..., :1]) & (mel < bands[..., 1:])  # [batch, n, mel]
    time = torch.arange(features.shape[1], device=features.device)
    edges = stretches * frames[:, None, None]
    in_stretch = (time >= edges[..., :1]) & (time < edges[..., 1:])  # [batch, m, time]
    masked = in_stretch.any(1)[:, :, None] | in_band.any(1)[:, None, :]
    return features.masked_fill(masked, 0.0)
