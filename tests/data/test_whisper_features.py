"""Whisper's features equal transformers', clip by clip."""

import io
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile
import torch
from transformers import WhisperFeatureExtractor
from transformers.audio_utils import hertz_to_mel, mel_filter_bank, mel_to_hertz

from muster.data.speech.features import apply_masks, mel_points
from muster.data.speech.whisper_features import SLANEY, WhisperLogMel, preprocessor_config
from real import FSDD, LIBRISPEECH, WHISPER, needs_speech, needs_whisper


def noise(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, count).astype(np.float32)


def padded(clips: list[np.ndarray], seconds: float) -> torch.Tensor:
    batch = torch.zeros(len(clips), round(seconds * 16000))
    for row, clip in zip(batch, clips, strict=True):
        row[: len(clip)] = torch.from_numpy(clip)
    return batch


def theirs(clip: np.ndarray, mels: int, seconds: float) -> np.ndarray:
    extractor = WhisperFeatureExtractor(feature_size=mels)
    found = extractor(clip, sampling_rate=16000, max_length=round(seconds * 16000))
    return found["input_features"][0].T


def clips_of(folder) -> list[np.ndarray]:
    table = pq.read_table(folder / "test.parquet").slice(0, 4)
    cells = (cell["bytes"] for cell in table["audio"].to_pylist())
    read = [soundfile.read(io.BytesIO(cell), dtype="float32") for cell in cells]
    return [samples[: 16000 * 16] for samples, _ in read]


@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("seconds", [30.0, 6.4, 1.28])
def test_features_equal_those_of_transformers_at_every_window(mels, seconds):
    longest = round(seconds * 16000)
    clips = [noise(count, count) for count in (longest, longest // 2 + 37, 401, 1)]
    clips[1] *= 1e-3
    features = WhisperLogMel(mels)(padded(clips, seconds))
    assert features.dtype == torch.float32
    assert features.shape == (4, longest // 160, mels)
    for ours, clip in zip(features.numpy(), clips, strict=True):
        assert np.abs(ours - theirs(clip, mels, seconds)).max() < 1e-4


@needs_speech
@pytest.mark.parametrize("mels", [80, 128])
def test_features_of_real_speech_equal_those_of_transformers(mels):
    clips = clips_of(LIBRISPEECH) + clips_of(FSDD)
    features = WhisperLogMel(mels)(padded(clips, 16.0)).numpy()
    for ours, clip in zip(features, clips, strict=True):
        assert np.abs(ours - theirs(clip, mels, 16.0)).max() < 1e-4


@pytest.mark.parametrize("mels", [80, 128])
def test_the_filters_are_slaney_s(mels):
    expected = mel_filter_bank(201, mels, 0.0, 8000.0, 16000, norm="slaney", mel_scale="slaney")
    assert np.abs(WhisperLogMel(mels).filters.numpy() - expected).max() < 1e-8


def test_a_loud_neighbour_does_not_raise_a_quiet_clip_s_floor():
    logmel, quiet = WhisperLogMel(), noise(16000) * 1e-4
    alone = logmel(padded([quiet], 1.28))
    beside = logmel(padded([quiet, noise(16000, 1) * 5], 1.28))
    torch.testing.assert_close(beside[:1], alone, atol=1e-5, rtol=0)
    warped = logmel(padded([quiet, quiet], 1.28), torch.tensor([1.0, 1.2]))
    torch.testing.assert_close(warped[:1], alone, atol=1e-3, rtol=0)
    assert (warped[1] - warped[0]).abs().max() > 0.01


def test_silence_is_finite_and_equals_transformers():
    silence = np.zeros(8000, np.float32)
    features = WhisperLogMel()(padded([silence], 1.28))[0].numpy()
    assert np.array_equal(features, theirs(silence, 80, 1.28))


def test_autocast_leaves_the_features_in_full_precision():
    samples, logmel = padded([noise(16000)], 1.28), WhisperLogMel()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = logmel(samples, torch.ones(1))
    assert cast.dtype == torch.float32
    assert torch.equal(cast, logmel(samples, torch.ones(1)))


@pytest.mark.parametrize("factor", [0.8, 1.2])
@pytest.mark.parametrize("hertz", [500, 3000])
def test_a_warp_moves_a_tone_to_its_multiple(factor, hertz):
    tone = np.sin(2 * np.pi * hertz * np.arange(16000) / 16000).astype(np.float32)
    features = WhisperLogMel(128)(padded([tone, tone], 1.0), torch.tensor([factor, 1.0]))
    centres = mel_points(130, 16000, SLANEY)[1:-1]
    heard = centres[features.mean(1).argmax(1)]
    assert abs(heard[0] - hertz * factor) < 60
    assert abs(heard[1] - hertz) < 60


@pytest.mark.parametrize("factor", [0.85, 1.15])
def test_a_warped_channel_is_interpolated_on_the_features_own_scale(factor):
    samples, logmel = padded([noise(16000)], 1.0), WhisperLogMel()
    plain, warped = logmel(samples)[0].numpy(), logmel(samples, torch.tensor([factor]))[0].numpy()
    edges = np.linspace(0, hertz_to_mel(8000.0, "slaney"), 82)
    heard = hertz_to_mel(mel_to_hertz(edges[1:-1], "slaney") / factor, "slaney")
    expected = np.stack([np.interp(heard, edges[1:-1], frame) for frame in plain])
    assert np.abs(warped - expected).max() < 1e-3


def test_masks_apply_to_the_features_as_they_are():
    features = WhisperLogMel()(padded([noise(16000)], 1.28))
    masked = apply_masks(
        features, torch.tensor([100]), torch.tensor([[[3.0, 5.0]]]), torch.tensor([[[0.5, 0.75]]])
    )
    assert not masked[0, :, 3:5].any()
    assert not masked[0, 50:75].any()
    assert torch.equal(masked[0, 75:, 5:], features[0, 75:, 5:])


def test_no_weights_travel_in_checkpoints():
    assert not WhisperLogMel().state_dict()


def test_a_window_is_made_of_whole_frames():
    with pytest.raises(ValueError, match="multiple of 160"):
        WhisperLogMel()(torch.zeros(1, 16001))


@needs_whisper
def test_the_features_asked_for_are_those_of_the_pretrained_folder():
    folder = json.loads((WHISPER / "preprocessor_config.json").read_text())
    assert {**preprocessor_config(80), **folder} == preprocessor_config(80)
