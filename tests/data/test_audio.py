"""Bytes or files to mono samples at the wanted rate, against scipy and against the formula."""

import contextlib
import io
import os

import numpy as np
import pytest
import soundfile
from clips import encode, tone

from muster.data.speech.audio import Waveform, decode, header, read, resample, seconds
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
    assert np.abs(resampled - tone(1.0, hertz))[200:-200].max() < 1e-5


@pytest.mark.parametrize("rate", RATES)
def test_speech_like_noise_resamples_as_scipy_does_it(rate):
    from scipy.signal import resample_poly  # slow to import

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
    assert np.abs(resampled)[200:-200].max() < 1e-5


def test_a_tone_of_the_old_band_has_no_image_after_raising_the_rate():
    resampled = resample(tone(1.0, 1000, 8000).astype(np.float32), 8000, 16000)
    spectrum = np.abs(np.fft.rfft(resampled[400:-400] * np.hanning(len(resampled) - 800)))
    hertz = np.fft.rfftfreq(len(resampled) - 800, 1 / 16000)
    assert spectrum[hertz > 4500].max() < 1e-5 * spectrum.max()


def test_the_same_rate_leaves_samples_as_they_are():
    samples = tone(0.1).astype(np.float32)
    assert np.array_equal(resample(samples, 16000, 16000), samples)


@pytest.mark.parametrize(
    "garbage",
    [b"", b"not audio at all", b"RIFF\x00\x00\x00\x00WAVE", b"fLaC" + b"\xff" * 64],
    ids=["empty", "words", "wav header only", "flac header only"],
)
def test_what_is_no_audio_is_refused_in_words(garbage):
    for look in (seconds, lambda clip: decode(clip, 16000)):
        with pytest.raises(DataError, match="not readable as audio"):
            look(garbage)


def test_a_file_that_is_not_there_is_refused_in_words(tmp_path):
    with pytest.raises(DataError, match="not readable as audio"):
        decode(tmp_path / "gone.wav", 16000)


def damaged(data: bytes) -> list[bytes]:
    """The whole, and pieces of it cut off in the header, just behind it and in the middle."""
    ends = [len(data), *range(0, 60, 4), 43, 45, len(data) // 2, len(data) - 1]
    return [data[:end] for end in ends]


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(
    ("container", "subtype"),
    [
        *(("WAV", kind) for kind in ("PCM_U8", "PCM_16", "PCM_24", "FLOAT", "ULAW", "IMA_ADPCM")),
        ("WAVEX", "PCM_16"),
        ("FLAC", "PCM_16"),
        ("FLAC", "PCM_24"),
        ("OGG", "VORBIS"),
        ("OGG", "OPUS"),
        ("MP3", "MPEG_LAYER_III"),
    ],
)
def test_headers_say_what_libsndfile_says_of_them(container, subtype, channels):
    noise = np.random.default_rng(0).standard_normal((4000, channels)) * 0.1
    file = io.BytesIO()
    soundfile.write(file, noise, 48000, format=container, subtype=subtype)
    for data in damaged(file.getvalue()):
        try:
            info = soundfile.info(io.BytesIO(data))
        except soundfile.LibsndfileError:
            with pytest.raises(DataError, match="not readable as audio"):
                header(data)
        else:
            found = header(memoryview(data))
            said = (found.rate, found.channels, found.frames)
            assert said == (info.samplerate, info.channels, info.frames)


@pytest.mark.parametrize("kind", ["float32", "float64", "int16", "int32"])
def test_plain_samples_are_scaled_and_resampled(kind):
    whole = tone(0.5, 300, 8000)
    if kind.startswith("int"):
        whole = whole * np.iinfo(kind).max
    clip = Waveform(whole.astype(kind), 8000)
    assert seconds(clip) == 0.5
    assert np.abs(decode(clip, 16000) - tone(0.5, 300))[100:-100].max() < 1e-3
    assert np.abs(decode(clip, 8000) - tone(0.5, 300, 8000)).max() < 1e-4


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
def test_only_the_first_seconds_are_decoded_where_there_is_a_limit(rate):
    for clip in (encode(tone(1.0, 300, rate), rate), Waveform(tone(1.0, 300, rate), rate)):
        first = decode(clip, 16000, limit=0.25)
        assert len(first) == 4000
        assert np.abs(first - decode(clip, 16000)[:4000])[:3600].max() < 1e-5
        assert len(decode(clip, 16000, limit=5.0)) == 16000


def test_samples_that_are_no_numbers_are_refused():
    broken = tone(0.1)
    broken[7] = np.nan
    file = io.BytesIO()
    soundfile.write(file, broken, 16000, format="WAV", subtype="FLOAT")
    for clip in (Waveform(broken, 16000), file.getvalue()):
        with pytest.raises(DataError, match="not finite numbers"):
            decode(clip, 16000)


def test_no_descriptor_stays_open():
    clips = [encode(tone(0.1)), b"garbage", encode(tone(0.1), container="OGG"), b""]
    before = len(os.listdir("/proc/self/fd"))
    for clip in clips * 5:
        with contextlib.suppress(DataError):
            decode(clip, 16000)
    assert len(os.listdir("/proc/self/fd")) == before


ODD_RATES = [11127, 15999, 44099, 192001]


@pytest.mark.parametrize("rate", ODD_RATES)
@pytest.mark.parametrize("hertz", [50.0, 3000.0])
def test_odd_rates_give_the_sine_of_the_formula(rate, hertz):
    resampled = resample(tone(1.0, hertz, rate).astype(np.float32), rate, 16000)
    assert resampled.dtype == np.float32
    assert len(resampled) == 16000
    assert np.abs(resampled - tone(1.0, hertz))[200:-200].max() < 1e-3
    for count in (0, 1, 2, 12345):
        assert len(resample(np.zeros(count, np.float32), rate, 16000)) == -(-count * 16000 // rate)


@pytest.mark.parametrize("rate", [8000, 11127, 16000, 22050, 44100])
@pytest.mark.parametrize("container", ["WAV", "FLAC"])
def test_a_clip_holds_what_its_header_promises_and_no_more(rate, container):
    clip = encode(tone(0.5003, 300, rate), rate, container)
    assert len(read(clip, 16000, seconds(clip))) == pytest.approx(8005, abs=1.01)
    for promised in (seconds(clip) - 0.001, seconds(clip) + 0.1):
        with pytest.raises(DataError, match=r"says 0\.\d+ s, the clip has 0\.50 s"):
            read(clip, 16000, promised)
    assert len(read(clip, 16000, seconds(clip), limit=0.25)) == 4000


@pytest.mark.parametrize("container", ["MP3", "OGG"])
def test_lossy_clips_hold_what_their_headers_promise(container):
    for span in (0.1, 0.5003, 1.7):
        for rate in (16000, 44100):
            clip = encode(tone(span, 300, rate), rate, container)
            assert len(read(clip, 16000, seconds(clip))) > 0
