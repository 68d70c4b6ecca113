"""Encoded bytes, a file or plain samples to mono float32 samples at the wanted rate.

Bytes reach libsndfile through a file in memory, not through Python's file interface: that calls back
into Python for every few kilobytes, and threads that decode then wait for each other and for the
training loop. The headers of WAV and FLAC are read here, as libsndfile would, without it. Only
resampling needs torch, and imports it: looking at a corpus does not wait for that.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import soundfile
from numpy.typing import NDArray

from muster.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

Samples = NDArray[np.float32]

SAMPLE_RATE = 16000  # Hz: what Whisper hears, and other models unless their recipe says otherwise
ZEROS, ROLLOFF = 16, 0.945  # of the resampling filter: crossings, share of the lower Nyquist rate
LARGEST_KERNEL = 1 << 20  # values of a filter bank in memory


@dataclass(frozen=True)
class Waveform:
    """Samples as they lie in a table: floats, or integers that span their type."""

    samples: NDArray[Any]  # [time]
    rate: int


Clip = bytes | memoryview | str | Path | Waveform
"""Encoded bytes, the name of a file, or samples."""


@dataclass(frozen=True)
class Header:
    container: str
    rate: int
    channels: int
    frames: int

    @property
    def seconds(self) -> float:
        return self.frames / self.rate


def header(clip: Clip) -> Header:
    """What the header says, without decoding. Raises DataError when it is no audio."""
    if isinstance(clip, Waveform):
        return Header(str(clip.samples.dtype), clip.rate, 1, len(clip.samples))
    if not isinstance(clip, str | Path):
        view = memoryview(clip)
        found = _flac(view) or _wav(view)
        if found:
            return found
    with _sound(clip) as file:
        return Header(file.format, file.samplerate, file.channels, file.frames)


def seconds(clip: Clip) -> float:
    """Duration from the header, without decoding. Raises DataError when it is no audio."""
    return header(clip).seconds


def decode(clip: Clip, sample_rate: int, limit: float | None = None) -> Samples:
    """Mono samples in [-1, 1] at `sample_rate`, the first `limit` seconds of them; channels are
    averaged, other rates resampled."""
    if isinstance(clip, Waveform):
        mono, rate = _as_float(clip.samples), clip.rate
    else:
        with _sound(clip) as file:
            rate = file.samplerate
            frames = -1 if limit is None else math.ceil(limit * rate)
            samples = file.read(frames, dtype="float32", always_2d=True)
        mono = samples[:, 0] if samples.shape[1] == 1 else samples.mean(axis=1)
    if limit is not None:
        mono = mono[: math.ceil(limit * rate)]
    if not np.isfinite(mono).all():
        raise DataError("some samples are not finite numbers")
    mono = resample(mono, rate, sample_rate)
    return mono if limit is None else mono[: round(limit * sample_rate)]


def read(clip: Clip, sample_rate: int, promised: float, limit: float | None = None) -> Samples:
    """`decode`, and refuse a clip that does not hold the `promised` seconds of its header: an MP3
    cut short decodes without complaint, and a file may have been replaced by a longer one. To
    resample rounds up to a whole sample."""
    samples = decode(clip, sample_rate, limit)
    held = len(samples) / sample_rate
    if held < 0.9 * min(promised, limit or promised) or held > promised + 1 / sample_rate:
        raise DataError(f"the header promises {promised:.2f} s, the clip holds {held:.2f} s")
    return samples


def _as_float(samples: NDArray[Any]) -> Samples:
    scale = 1.0 if samples.dtype.kind == "f" else -float(np.iinfo(samples.dtype).min)
    return (samples / scale).astype(np.float32)


@contextmanager
def _sound(clip: bytes | memoryview | str | Path) -> Iterator[soundfile.SoundFile]:
    try:
        with soundfile.SoundFile(_handle(clip)) as file:
            yield file
    except (soundfile.LibsndfileError, RuntimeError, TypeError) as error:
        raise DataError(f"not readable as audio ({_reason(error)})") from None


def _handle(clip: bytes | memoryview | str | Path) -> str | int:
    """A name, or the descriptor of a file in memory, which SoundFile closes."""
    if isinstance(clip, str | Path):
        return str(clip)
    descriptor = os.memfd_create("clip")
    view = memoryview(clip)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _flac(data: memoryview) -> Header | None:
    """Of a FLAC stream that begins soundly and says how long it is."""
    if bytes(data[:4]) != b"fLaC" or len(data) < 42 or data[4] & 0x7F:
        return None
    packed = int.from_bytes(data[18:26], "big")  # 20 bits rate, 3 channels, 5 depth, 36 frames
    found = Header("FLAC", packed >> 44, (packed >> 41 & 7) + 1, packed & (1 << 36) - 1)
    start, last = 4, False
    while not last:
        if start + 4 > len(data):
            return None
        last = bool(data[start] & 0x80)
        start += 4 + int.from_bytes(data[start + 1 : start + 4], "big")
    sync = bytes(data[start : start + 2])
    return found if found.rate and found.frames and sync in (b"\xff\xf8", b"\xff\xf9") else None


def _wav(data: memoryview) -> Header | None:
    """Of plain PCM or float WAV; whatever else is left to libsndfile."""
    if bytes(data[:4]) != b"RIFF" or bytes(data[8:12]) != b"WAVE":
        return None
    start, rate, channels, block = 12, 0, 0, 0
    while start + 8 <= len(data):
        name, size = (
            bytes(data[start : start + 4]),
            int.from_bytes(data[start + 4 : start + 8], "little"),
        )
        start += 8
        if name == b"fmt " and start + 16 <= len(data):
            kind, channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", data, start)
            if kind not in (1, 3) or not channels or not rate or block * 8 != channels * bits:
                return None
        elif name == b"data":
            frames = min(size, len(data) - start) // block if block else 0
            return Header("WAV", rate, channels, frames) if frames else None
        start += size + size % 2
    return None


def resample(samples: Samples, source: int, target: int) -> Samples:
    """Band-limited resampling by a polyphase windowed sinc; exact length ceil(n · target / source)."""
    if source == target:
        return np.ascontiguousarray(samples)
    divisor = math.gcd(source, target)
    up, down = target // divisor, source // divisor
    length = -(-len(samples) * up // down)
    if up * down > LARGEST_KERNEL:
        return _resample_odd(samples, up, down, length)
    import torch
    import torch.nn.functional as F

    kernel, reach = _sinc_kernel(up, down)
    padded = F.pad(torch.from_numpy(samples)[None, None], (reach, reach + down))
    phases = F.conv1d(padded, kernel, stride=down)  # [1, up, blocks]
    return phases.transpose(1, 2).reshape(-1)[:length].numpy()


@lru_cache(maxsize=16)
def _sinc_kernel(up: int, down: int) -> tuple[Tensor, int]:
    """One filter per output phase, `[up, 1, taps]`, and how far it reaches to the left."""
    import torch

    cutoff, reach = _band(up, down)
    phase = np.arange(up)[:, None] * down / up
    kernel = _sinc(np.arange(-reach, reach + down) - phase, cutoff)
    return torch.from_numpy(kernel)[:, None], reach


def _resample_odd(samples: Samples, up: int, down: int, length: int) -> Samples:
    """The same filter for rates with hardly a common divisor: nearly every output has a phase of its
    own, and a filter for each would take gigabytes. It lies between two of a few thousand phases."""
    table, reach = _phase_table(up, down)
    phases, taps = len(table) - 1, table.shape[1]
    inputs = np.lib.stride_tricks.sliding_window_view(np.pad(samples, (reach, reach + 2)), taps)
    block = max(1, LARGEST_KERNEL // taps)
    resampled = np.empty(length, np.float32)
    for start in range(0, length, block):
        at, phase = np.divmod(np.arange(start, min(start + block, length)) * down, up)
        below, share = np.divmod(phase * (phases / up), 1.0)
        row, heard = below.astype(np.int64), inputs[at]
        before = np.einsum("nt,nt->n", heard, table[row])
        after = np.einsum("nt,nt->n", heard, table[row + 1])
        resampled[start : start + block] = before + share * (after - before)
    return resampled


@lru_cache(maxsize=16)
def _phase_table(up: int, down: int) -> tuple[Samples, int]:
    """Filters at equal steps from one sample of the source to the next, `[phases + 1, taps]`, and
    how far they reach to the left."""
    cutoff, reach = _band(up, down)
    taps = np.arange(-reach, reach + 2)
    phases = max(1, LARGEST_KERNEL // len(taps))
    return _sinc(taps - np.arange(phases + 1)[:, None] / phases, cutoff), reach


def _band(up: int, down: int) -> tuple[float, int]:
    """Where the filter cuts off, relative to the source's Nyquist rate, and how many samples of the
    source it reaches to either side."""
    cutoff = min(up, down) * ROLLOFF / down
    return cutoff, math.ceil(ZEROS / cutoff)


def _sinc(t: NDArray[np.float64], cutoff: float) -> Samples:
    """`ZEROS` crossings of a Hann-windowed sinc, at distances `t` in samples of the source."""
    t = t * cutoff
    window = np.cos(t.clip(-ZEROS, ZEROS) * (math.pi / ZEROS / 2)) ** 2
    kernel: Samples = (np.sinc(t) * window * cutoff).astype(np.float32)
    return kernel


def _reason(error: Exception) -> str:
    """libsndfile's own words, without the name it has for a clip that is not a file."""
    words = getattr(error, "error_string", str(error))
    return words.removeprefix("Error : ").strip(" .") or type(error).__name__
