"""Encoded bytes, a file or plain samples to mono float32 samples at the wanted rate.

Bytes reach libsndfile through a file in memory, not through Python's file interface: that calls back
into Python for every few kilobytes, so that decoding threads compete for the GIL with the training
loop. The headers of WAV and FLAC are read here, as libsndfile would, without it.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

from muster.errors import DataError

Samples = NDArray[np.float32]

SAMPLE_RATE = 16000  # Hz: Whisper's, and the default of other models


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
            try:
                samples = file.read(frames, dtype="float32", always_2d=True)
            except MemoryError:  # a header may say anything
                raise DataError(
                    f"its header says {file.frames:,} frames, more than there is memory for"
                ) from None
        mono = samples[:, 0] if samples.shape[1] == 1 else samples.mean(axis=1)
    if limit is not None:
        mono = mono[: math.ceil(limit * rate)]
    if not np.isfinite(mono).all():
        raise DataError("some samples are not finite numbers")
    mono = resample(mono, rate, sample_rate)
    return mono if limit is None else mono[: round(limit * sample_rate)]


def read(clip: Clip, sample_rate: int, expected: float, limit: float | None = None) -> Samples:
    """`decode`, and refuse a clip that does not hold the `expected` seconds of its header: a truncated
    MP3 decodes without error, and a file may have been replaced by a longer one. To
    resample rounds up to a whole sample."""
    samples = decode(clip, sample_rate, limit)
    actual = len(samples) / sample_rate
    if actual < 0.9 * min(expected, limit or expected) or actual > expected + 1 / sample_rate:
        raise DataError(f"the header says {expected:.2f} s, the clip has {actual:.2f} s")
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


def _handle(clip: bytes | memoryview | str | Path) -> bytes | int:
    """A name, or the descriptor of a file in memory, which SoundFile closes."""
    if isinstance(clip, str | Path):
        try:
            if Path(clip).exists() and not Path(clip).is_file():  # a pipe would be waited for
                raise DataError("not readable as audio (it is not a file)")
            return os.fsencode(clip)  # SoundFile itself refuses names that are no UTF-8
        except (OSError, UnicodeError):
            raise DataError("not readable as audio (no file can have its name)") from None
    descriptor = os.memfd_create("clip")
    view = memoryview(clip)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _flac(data: memoryview) -> Header | None:
    """Of a FLAC stream with a valid header that gives its length."""
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
    """Of plain PCM or float WAV; anything else is left to libsndfile."""
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
    """Band-limited resampling by libsoxr; exact length ceil(n · target / source)."""
    if source == target:
        return np.ascontiguousarray(samples)
    import soxr

    length = -(-len(samples) * target // source)
    padding = np.zeros(-(-source // target) + 1, np.float32)  # soxr rounds lengths to the nearest
    try:
        resampled: Samples = soxr.resample(np.concatenate([samples, padding]), source, target)
    except (RuntimeError, ValueError) as error:
        raise DataError(f"{source} Hz cannot be resampled to {target} Hz ({error})") from None
    return resampled[:length]


def _reason(error: Exception) -> str:
    """libsndfile's message, without the file name."""
    words = getattr(error, "error_string", str(error))
    return words.removeprefix("Error : ").strip(" .") or type(error).__name__
