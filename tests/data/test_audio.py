"""Bytes or files to mono samples at the wanted rate, against scipy and against the formula."""

import numpy as np
import pytest
from clips import encode, tone
from scipy.signal import resample_poly

from muster.data.audio import decode, resample, seconds
from muster.errors import DataError

RATES = [8000, 22050, 44100, 48000]


@pytest.mark.parametrize(("container", "error"), [("WAV", 1e-4), ("FLAC", 1e-4), ("OGG", 5e-2)])
def test_bytes_and_files_decode_to_what_was_encoded(tmp_path, container, error):
    samples = tone(0.5)
    data = encode(samples, 16000, container)
    path = tmp_path / f"clip.{container.lower()}"
    path.write_bytes(data)
    for clip in (data, path, str(path)):
        decoded = decode(clip, 16000)
        assert decoded.dtype == np.float32
        assert decoded.shape == (8000,)
        assert np.abs(decoded - samples).max() < error
        assert seconds(clip) == 0.5


def test_channels_are_averaged():
    left, right = tone(0.3, 300), tone(0.3, 900)
    decoded = decode(encode(np.stack([left, right], axis=1)), 16000)
    assert np.abs(decoded - (left + right) / 2).max() < 1e-4


def test_stereo_at_another_rate_is_averaged_and_resampled():
    clip = np.stack([tone(0.3, 300, 44100), np.zeros(13230)], axis=1)
    decoded = decode(encode(clip, 44100), 16000)
    assert np.abs(decoded - tone(0.3, 300) / 2)[100:-100].max() < 1e-3


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("hertz", [50.0, 440.0, 3000.0])
def test_a_sine_resampled_is_the_sine_of_the_formula(rate, hertz):
    resampled = resample(tone(1.0, hertz, rate).astype(np.float32), rate, 16000)
    assert len(resampled) == 16000
    assert np.abs(resampled - tone(1.0, hertz))[200:-200].max() < 1e-3


@pytest.mark.parametrize("rate", RATES)
def test_speech_like_noise_resamples_as_scipy_does_it(rate):
    rng = np.random.default_rng(0)
    smooth = np.convolve(rng.standard_normal(rate), np.hanning(rate // 1000), mode="same")
    smooth = (smooth / np.abs(smooth).max()).astype(np.float32)
    divisor = np.gcd(rate, 16000)
    expected = resample_poly(smooth.astype(np.float64), 16000 // divisor, rate // divisor)
    assert np.abs(resample(smooth, rate, 16000) - expected)[200:-200].max() < 5e-3


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
@pytest.mark.parametrize("count", [0, 1, 2, 159, 441, 12345])
def test_the_length_is_exact(rate, count):
    assert len(resample(np.zeros(count, np.float32), rate, 16000)) == -(-count * 16000 // rate)


@pytest.mark.parametrize(("rate", "hertz"), [(44100, 10000), (48000, 10000), (22050, 10000)])
def test_a_tone_above_the_new_nyquist_rate_is_gone(rate, hertz):
    resampled = resample(tone(1.0, hertz, rate).astype(np.float32), rate, 16000)
    assert np.abs(resampled)[200:-200].max() < 0.5 * 1e-3


def test_a_tone_of_the_old_band_has_no_image_after_raising_the_rate():
    resampled = resample(tone(1.0, 1000, 8000).astype(np.float32), 8000, 16000)
    spectrum = np.abs(np.fft.rfft(resampled[400:-400] * np.hanning(len(resampled) - 800)))
    hertz = np.fft.rfftfreq(len(resampled) - 800, 1 / 16000)
    assert spectrum[hertz > 4500].max() < 1e-3 * spectrum.max()


def test_the_same_rate_leaves_samples_as_they_are():
    samples = tone(0.1).astype(np.float32)
    assert np.array_equal(resample(samples, 16000, 16000), samples)


@pytest.mark.parametrize(
    "garbage",
    [b"", b"not audio at all", b"RIFF\x00\x00\x00\x00WAVE", b"fLaC" + b"\xff" * 64],
    ids=["empty", "words", "wav header only", "flac header only"],
)
def test_what_is_no_audio_is_refused_in_words(garbage):
    for read in (seconds, lambda clip: decode(clip, 16000)):
        with pytest.raises(DataError, match="not readable as audio"):
            read(garbage)


def test_a_file_that_is_not_there_is_refused_in_words(tmp_path):
    with pytest.raises(DataError, match="not readable as audio"):
        decode(tmp_path / "gone.wav", 16000)
