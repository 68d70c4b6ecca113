"""What the speech encoders of transformers read: normalised waveforms, or log-mel features in pairs.

The numbers equal transformers' Wav2Vec2FeatureExtractor and SeamlessM4TFeatureExtractor, batched on
whatever device the waveforms are. A clip's own values do not depend on its padding.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from muster.data.speech.audio import SAMPLE_RATE
from muster.data.speech.features import HTK, apply_masks, mel_points, warp_matrix
from muster.errors import RecipeError
from muster.reading import json_file
from muster.reading.text import in_one_line

MOST_RATE = 768_000  # Hz
PREPROCESSOR = "preprocessor_config.json"
RAW, MEL = "Wav2Vec2FeatureExtractor", "SeamlessM4TFeatureExtractor"
VARIANCE_FLOOR = 1e-7

WINDOW, HOP, FFT = 400, 160, 512  # samples
LOWEST_HZ, PREEMPHASIS, FULL_SCALE = 20.0, 0.97, 2.0**15
MEL_FLOOR = 1.192092955078125e-07


@dataclass(frozen=True)
class ExtractorSettings:
    """preprocessor_config.json, as far as it changes the numbers."""

    kind: str
    sample_rate: int = SAMPLE_RATE
    normalize: bool = True  # raw audio: mean 0, variance 1 of each clip
    masks_padding: bool = False  # whether the model is told which samples are padding
    mels: int = 80
    stride: int = 2  # frames in one input

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def document(self) -> dict[str, Any]:
        """preprocessor_config.json."""
        common = {
            "feature_extractor_type": self.kind,
            "padding_side": "right",
            "padding_value": 0.0,
            "return_attention_mask": self.masks_padding,
            "sampling_rate": self.sample_rate,
        }
        if self.kind == RAW:
            return common | {"feature_size": 1, "do_normalize": self.normalize}
        mel = {"feature_size": self.mels, "num_mel_bins": self.mels, "stride": self.stride}
        return common | mel


def read_extractor(folder: Path, kind: str, masks_padding: bool) -> ExtractorSettings:
    """`masks_padding`: where there is no preprocessor_config.json."""
    path = folder / PREPROCESSOR
    if not path.is_file():
        return ExtractorSettings(kind, masks_padding=masks_padding or kind == MEL)
    found = _read(path)
    if (named := found.get("feature_extractor_type", kind)) != kind:
        raise RecipeError(
            f"model.pretrained: {path} has feature_extractor_type {named}, but a model of this "
            f"model_type reads what {kind} gives; copy the folder again"
        )
    if found.get("padding_value", 0.0) != 0.0 or found.get("padding_side", "right") != "right":
        raise RecipeError(
            f"model.pretrained: {path} pads with {found.get('padding_value')} on the "
            f"{found.get('padding_side')}; muster pads with 0.0 on the right"
        )
    return ExtractorSettings(
        kind,
        sample_rate=_whole(path, found, "sampling_rate", SAMPLE_RATE, MOST_RATE),
        normalize=bool(found.get("do_normalize", True)),
        masks_padding=kind == MEL or bool(found.get("return_attention_mask", False)),
        mels=_whole(path, found, "num_mel_bins", 80, 1024),
        stride=_whole(path, found, "stride", 2, 64),
    )


def read_rate(folder: Path) -> int:
    """Hz that a folder's model reads."""
    path = folder / PREPROCESSOR
    if not path.is_file():
        return SAMPLE_RATE
    return _whole(path, _read(path), "sampling_rate", SAMPLE_RATE, MOST_RATE)


def _whole(path: Path, found: dict[str, Any], key: str, default: int, most: int) -> int:
    value = found.get(key, default)
    if type(value) is not int or not 0 < value <= most:
        raise RecipeError(
            f"model.pretrained: {path} has {key} = {in_one_line(value)}, expected a whole number from 1 to "
            f"{most}; copy it again"
        )
    return value


def _read(path: Path) -> dict[str, Any]:
    try:
        return json_file.read(path)
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"model.pretrained: {path} cannot be read ({in_one_line(error, 300)}); copy it again"
        ) from None


class RawAudio(nn.Module):
    """`[batch, samples]` and lengths → the same, of mean 0 and variance 1 over each clip's samples.

    A clip shorter than `least`, the samples of a single frame, counts as silent up to there.
    """

    def __init__(self, normalize: bool, least: int) -> None:
        super().__init__()
        self.normalize, self.least = normalize, least

    def frames(self, samples: Tensor) -> Tensor:
        return samples.clamp(min=self.least)

    @torch.no_grad()
    def forward(
        self, samples: Tensor, lengths: Tensor, warp: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`warp` is of mel channels, which there are none of."""
        values = samples.float()
        if self.normalize:
            own = torch.arange(values.shape[1], device=values.device) < lengths[:, None]
            count = lengths.clamp(min=1)[:, None]
            mean = values.sum(1, keepdim=True) / count  # padding is zero
            values = (values - mean).masked_fill(~own, 0.0)
            variance = values.square().sum(1, keepdim=True) / count
            values = values / (variance + VARIANCE_FLOOR).sqrt()
        return values, self.frames(lengths)


class StackedMel(nn.Module):
    """`[batch, samples]` and lengths → Kaldi's log-mel features, `[batch, frames / stride, mels · stride]`.

    Each channel has mean 0 and variance 1 over a clip's frames. A last frame that fills no group of
    `stride` is not counted in the lengths.
    """

    def __init__(self, sample_rate: int, mels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.least = WINDOW + (stride - 1) * HOP
        self.window: Tensor
        window = torch.hann_window(WINDOW, periodic=False, dtype=torch.float64).pow(0.85)
        self.register_buffer("window", window.float(), persistent=False)  # Povey's
        self.filters: Tensor
        self.register_buffer("filters", _kaldi_filters(sample_rate, mels), persistent=False)
        self.centres: Tensor
        centres = mel_points(mels + 2, sample_rate, HTK)[1:-1]
        self.register_buffer("centres", centres.float(), persistent=False)

    def frames(self, samples: Tensor) -> Tensor:
        return self._windows(samples) // self.stride

    @torch.no_grad()
    def forward(
        self,
        samples: Tensor,
        lengths: Tensor,
        warp: Tensor | None = None,
        masks: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`warp` `[batch]` stretches each clip's frequencies. `masks`: SpecAugment's, as `apply_masks`
        takes them."""
        count = self._windows(lengths)
        mel = self._energies(samples)
        if warp is not None:
            mel = mel @ warp_matrix(warp, self.centres, HTK)
        own = torch.arange(mel.shape[1], device=mel.device) < count[:, None]
        mel = _normalised(mel, own[..., None], count[:, None, None])
        if masks is not None:
            mel = apply_masks(mel, count, *masks)
        mel = nn.functional.pad(mel, (0, 0, 0, -mel.shape[1] % self.stride))
        return mel.unflatten(1, (-1, self.stride)).flatten(2), count // self.stride

    def _windows(self, samples: Tensor) -> Tensor:
        return (samples.clamp(min=self.least) - WINDOW) // HOP + 1

    def _energies(self, samples: Tensor) -> Tensor:
        """`[batch, frames, mels]`, in float32."""
        with torch.autocast(samples.device.type, enabled=False):
            framed = (samples.float() * FULL_SCALE).unfold(1, WINDOW, HOP)
            framed = framed - framed.mean(-1, keepdim=True)
            first = framed[..., :1] * (1 - PREEMPHASIS)
            framed = torch.cat([first, framed[..., 1:] - PREEMPHASIS * framed[..., :-1]], -1)
            spectrum = torch.fft.rfft(framed * self.window, n=FFT)
            power = spectrum.real.square() + spectrum.imag.square()
            return (power @ self.filters).clamp(min=MEL_FLOOR).log()


def _normalised(mel: Tensor, own: Tensor, count: Tensor) -> Tensor:
    """By the sample variance, whose divisor is one less than the count."""
    mean = mel.masked_fill(~own, 0.0).sum(1, keepdim=True) / count.clamp(min=1)
    centred = (mel - mean).masked_fill(~own, 0.0)
    variance = centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)
    return centred / (variance + VARIANCE_FLOOR).sqrt()


def _kaldi_filters(sample_rate: int, mels: int) -> Tensor:
    """`[bins, mels]`: triangles over the mel scale, not over frequency."""
    ends = HTK.to_mel(torch.tensor([LOWEST_HZ, sample_rate // 2], dtype=torch.float64))
    edges = torch.linspace(float(ends[0]), float(ends[1]), mels + 2, dtype=torch.float64)
    hertz = torch.arange(FFT // 2 + 1, dtype=torch.float64) * sample_rate / FFT
    grid = HTK.to_mel(hertz)[:, None]
    rising = (grid - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - grid) / (edges[2:] - edges[1:-1])
    return torch.minimum(rising, falling).clamp(min=0).float()


def make_extractor(settings: ExtractorSettings, least: int) -> RawAudio | StackedMel:
    """`least`: the samples that the model's convolutions need for one frame."""
    if settings.kind == RAW:
        return RawAudio(settings.normalize, least)
    return StackedMel(settings.sample_rate, settings.mels, settings.stride)
