"""Encoded bytes or a file to mono float32 samples at the wanted rate."""

from __future__ import annotations

import io
import math
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import soundfile
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from muster.errors import DataError

Samples = NDArray[np.float32]


def _open(audio: bytes | str | Path) -> BinaryIO | str:
    return io.BytesIO(audio) if isinstance(audio, bytes) else str(audio)


def seconds(audio: bytes | str | Path) -> float:
    """Duration from the header, without decoding. Raises DataError when it is no audio."""
    try:
        info = soundfile.info(_open(audio))
    except (soundfile.LibsndfileError, RuntimeError, TypeError) as error:
        raise DataError(f"not readable as audio ({_reason(error)})") from None
    return info.frames / info.samplerate


def decode(audio: bytes | str | Path, sample_rate: int) -> Samples:
    """Mono samples in [-1, 1] at `sample_rate`; channels are averaged, other rates resampled."""
    try:
        samples, rate = soundfile.read(_open(audio), dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, RuntimeError, TypeError) as error:
        raise DataError(f"not readable as audio ({_reason(error)})") from None
    mono = samples[:, 0] if samples.shape[1] == 1 else samples.mean(axis=1)
    return resample(mono, rate, sample_rate)


def resample(samples: Samples, source: int, target: int) -> Samples:
    """Band-limited resampling by a polyphase windowed sinc; exact length ceil(n · target / source)."""
    if source == target:
        return np.ascontiguousarray(samples)
    divisor = math.gcd(source, target)
    up, down = target // divisor, source // divisor
    kernel, reach = _sinc_kernel(up, down)
    length = math.ceil(len(samples) * up / down)
    padded = F.pad(torch.from_numpy(samples)[None, None], (reach, reach + down))
    phases = F.conv1d(padded, kernel, stride=down)  # [1, up, blocks]
    return phases.transpose(1, 2).reshape(-1)[:length].numpy()


@lru_cache(maxsize=16)
def _sinc_kernel(up: int, down: int, zeros: int = 16, rolloff: float = 0.945) -> tuple[Tensor, int]:
    """One filter per output phase, `[up, 1, taps]`, and how far it reaches to the left.

    `zeros` crossings of a Hann-windowed sinc, cut off at `rolloff` of the lower Nyquist rate.
    """
    cutoff = min(up, down) * rolloff / down  # relative to the source's Nyquist rate
    reach = math.ceil(zeros / cutoff)
    taps = torch.arange(-reach, reach + down, dtype=torch.float64)
    phase = torch.arange(up, dtype=torch.float64)[:, None] * down / up
    t = (taps[None] - phase) * cutoff
    window = torch.cos(t.clamp(-zeros, zeros) * math.pi / zeros / 2) ** 2
    kernel = torch.sinc(t) * window * cutoff
    return kernel[:, None].float(), reach


def _reason(error: Exception) -> str:
    """libsndfile's own words, without the name it has for a clip that is not a file."""
    words = getattr(error, "error_string", str(error))
    return words.removeprefix("Error : ").strip(" .") or type(error).__name__
