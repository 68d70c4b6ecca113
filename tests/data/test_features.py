"""Log-mel features follow their definition and the clip, never its neighbours."""

import numpy as np
import pytest
import torch

from muster.data.speech.features import (
    FIXED_MEAN,
    FIXED_SCALE,
    FLOOR,
    Augmentation,
    LogMel,
    StreamingLogMel,
    apply_masks,
    draw,
    mel_points,
    warp_matrix,
)

LENGTHS = [8000, 16000, 12345, 161]


def noise(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.1


def batch(lengths: list[int], width: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    samples = torch.zeros(len(lengths), width or max(lengths))
    for row, length in enumerate(lengths):
        samples[row, :length] = noise(length, row)
    return samples, torch.tensor(lengths)


def by_definition(samples: np.ndarray, rate: int, mels: int) -> np.ndarray:
    """Log-mel energies frame by frame and filter by filter, in float64 and without torch."""
    hop, window = rate // 100, rate // 40
    size = 256 if rate == 8000 else 512
    count = -(-len(samples) // hop)
    padded = np.concatenate([np.zeros(window - hop), samples, np.zeros(count * hop - len(samples))])
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    mel = lambda f: 2595 * np.log10(1 + f / 700)  # noqa: E731
    edges = 700 * (10 ** (np.linspace(mel(20), mel(rate / 2), mels + 2) / 2595) - 1)
    hertz = np.arange(size // 2 + 1) * rate / size
    frames = np.zeros((count, mels))
    for t in range(count):
        power = np.abs(np.fft.fft(padded[t * hop : t * hop + window] * hann, size)) ** 2
        for m in range(mels):
            low, centre, high = edges[m : m + 3]
            weights = np.interp(hertz, [low, centre, high], [0, 1, 0])
            frames[t, m] = np.log(power[: len(hertz)] @ weights + FLOOR)
    return frames


@pytest.mark.parametrize(("rate", "mels"), [(16000, 80), (8000, 40)])
def test_energies_follow_the_definition(rate, mels):
    samples = noise(rate // 2 + 37)
    expected = by_definition(samples.double().numpy(), rate, mels)
    fixed, frames = LogMel(rate, mels, "fixed")(samples[None], torch.tensor([len(samples)]))
    assert frames.tolist() == [len(expected)]
    assert np.abs(fixed[0].numpy() * FIXED_SCALE + FIXED_MEAN - expected).max() < 1e-3

    clip, _ = LogMel(rate, mels, "clip")(samples[None], torch.tensor([len(samples)]))
    normal = (expected - expected.mean(0)) / np.sqrt(expected.var(0) + 1e-2)
    assert np.abs(clip[0].numpy() - normal).max() < 1e-3


@pytest.mark.parametrize("normalize", ["clip", "fixed"])
def test_features_depend_neither_on_padding_nor_on_neighbours(normalize):
    logmel = LogMel(normalize=normalize)
    together, frames = logmel(*batch(LENGTHS))
    wider, _ = logmel(*batch(LENGTHS, width=20011))
    for row, length in enumerate(LENGTHS):
        alone, (count,) = logmel(noise(length, row)[None], torch.tensor([length]))
        assert frames[row] == count
        torch.testing.assert_close(together[row, :count], alone[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(wider[row, :count], alone[0], atol=1e-5, rtol=0)
        assert not together[row, count:].any()
        assert not wider[row, count:].any()


def test_a_clip_is_normalised_to_mean_zero_and_variance_one():
    features, frames = LogMel(normalize="clip")(*batch(LENGTHS[:3]))
    for row, count in enumerate(frames.tolist()):
        clip = features[row, :count]
        assert clip.mean(0).abs().max() < 1e-4
        assert (clip.var(0, unbiased=False) - 1).abs().max() < 0.1


def test_silence_is_finite():
    for normalize in ("clip", "fixed"):
        features, _ = LogMel(normalize=normalize)(torch.zeros(1, 1600), torch.tensor([1600]))
        assert torch.isfinite(features).all()


@pytest.mark.parametrize(("samples", "frames"), [(0, 0), (1, 1), (160, 1), (161, 2), (16000, 100)])
def test_a_frame_for_every_hop_begun(samples, frames):
    logmel = LogMel()
    assert logmel.frames(torch.tensor([samples])).tolist() == [frames]
    features, counted = logmel(torch.zeros(1, max(samples, 1)), torch.tensor([samples]))
    assert counted.tolist() == [frames]
    assert features.shape == (1, max(frames, 1), 80)


def test_a_frame_knows_nothing_of_what_comes_later():
    logmel = LogMel(normalize="fixed")
    samples = noise(1600)[None]
    changed = samples.clone()
    changed[0, 960:] = 0.5
    before, _ = logmel(samples, torch.tensor([1600]))
    after, _ = logmel(changed, torch.tensor([1600]))
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


@pytest.mark.parametrize("seed", range(8))
def test_streamed_frames_equal_offline_frames_however_the_samples_arrive(seed):
    rng = np.random.default_rng(seed)
    samples = noise(int(rng.integers(1, 9000)), seed)
    logmel = LogMel(normalize="fixed")
    offline, _ = logmel(samples[None], torch.tensor([len(samples)]))
    stream, streamed, start = StreamingLogMel(logmel), [], 0
    while start < len(samples):
        count = int(rng.choice([0, 1, 7, 159, 160, 161, 400, 1000]))
        streamed.append(stream.push(samples[start : start + count], start + count >= len(samples)))
        start += count
    torch.testing.assert_close(torch.cat(streamed), offline[0], atol=1e-5, rtol=0)


def test_a_stream_gives_a_frame_as_soon_as_its_last_sample_is_there():
    stream = StreamingLogMel(LogMel(normalize="fixed"))
    assert stream.push(noise(159)).shape == (0, 80)
    assert stream.push(noise(1)).shape == (1, 80)
    assert stream.push(noise(320)).shape == (2, 80)


def test_streaming_refuses_what_needs_the_whole_clip():
    with pytest.raises(ValueError, match=r"data\.normalize"):
        StreamingLogMel(LogMel(normalize="clip"))


def drawn(*key: int) -> tuple[np.ndarray, np.ndarray, float]:
    return draw(key, 80, Augmentation(2, 27, 3, 0.1, warp=0.2))


def test_a_draw_depends_on_the_key_alone():
    first = drawn(42, 1, 7)
    drawn(1, 1, 1)
    np.random.seed(0)
    torch.manual_seed(0)
    assert all(np.array_equal(a, b) for a, b in zip(first, drawn(42, 1, 7), strict=True))
    for other in (drawn(43, 1, 7), drawn(42, 2, 7), drawn(42, 1, 8)):
        assert not np.array_equal(first[1], other[1])
        assert first[2] != other[2]


def test_draws_keep_their_limits_and_reach_all_over():
    many = [drawn(0, 0, i) for i in range(2000)]
    bands = np.concatenate([b for b, _, _ in many])
    stretches = np.concatenate([s for _, s, _ in many])
    warps = np.array([w for _, _, w in many])
    assert bands.shape == (4000, 2)
    assert stretches.shape == (6000, 2)
    widths, spans = bands[:, 1] - bands[:, 0], stretches[:, 1] - stretches[:, 0]
    assert set(widths.tolist()) == set(range(28))
    assert bands.min() == 0
    assert bands.max() >= 79
    assert 0 <= spans.min() < 0.001
    assert 0.099 < spans.max() <= 0.1 + 1e-6
    assert stretches.min() >= 0
    assert 0.99 < stretches.max() <= 1 + 1e-6
    assert 0.8 <= warps.min() < 0.81
    assert 1.19 < warps.max() <= 1.2


def test_masks_wider_than_the_features_and_no_masks_at_all_are_drawn():
    bands, stretches, warp = draw((0,), 8, Augmentation(4, 27, 0, 0.1, warp=0.0))
    assert bands.shape == (4, 2)
    assert bands[:, 0].min() >= 0
    assert stretches.shape == (0, 2)
    assert warp == 1.0


def test_a_warp_of_one_changes_nothing():
    samples, lengths = batch(LENGTHS)
    logmel = LogMel()
    plain, _ = logmel(samples, lengths)
    warped, _ = logmel(samples, lengths, torch.ones(len(LENGTHS)))
    torch.testing.assert_close(warped, plain, atol=2e-3, rtol=0)


@pytest.mark.parametrize("factor", [0.8, 1.2])
def test_a_warp_moves_a_tone_to_its_multiple_and_leaves_the_neighbour_alone(factor):
    tone = torch.sin(2 * torch.pi * 2000 * torch.arange(8000) / 16000)
    logmel = LogMel(normalize="fixed")
    samples, lengths = torch.stack([tone, tone]), torch.tensor([8000, 8000])
    features, _ = logmel(samples, lengths, torch.tensor([factor, 1.0]))
    centres = mel_points(82, 16000)[1:-1]
    heard = centres[features[:, 10:].mean(1).argmax(1)]
    assert abs(heard[0] - 2000 * factor) < 80
    assert abs(heard[1] - 2000) < 80


def test_a_warp_takes_every_channel_from_weights_that_sum_to_one():
    weights = warp_matrix(torch.tensor([0.8, 1.0, 1.3]), LogMel().centres)
    torch.testing.assert_close(weights.sum(1), torch.ones(3, 80), atol=1e-4, rtol=0)


def test_exactly_the_drawn_cells_are_masked():
    features = torch.ones(2, 50, 80)
    frames = torch.tensor([40, 50])
    bands = torch.tensor([[[3.0, 5.0], [70.0, 70.0]], [[0.0, 1.0], [79.0, 80.0]]])
    stretches = torch.tensor([[[0.25, 0.5]], [[0.0, 0.1]]])
    masked = apply_masks(features, frames, bands, stretches)
    expected = torch.ones(2, 50, 80)
    expected[0, :, 3:5] = 0
    expected[0, 10:20] = 0
    expected[1, :, 0] = 0
    expected[1, :, 79] = 0
    expected[1, 0:5] = 0
    assert torch.equal(masked, expected)
    assert features.all(), "the input stays as it was"


def test_time_masks_scale_with_the_clip_and_not_with_its_padding():
    stretch = torch.tensor([[[0.25, 0.5]]])
    none = torch.zeros(1, 0, 2)
    for frames in (20, 100):
        masked = apply_masks(torch.ones(1, 200, 4), torch.tensor([frames]), none, stretch)
        rows = (masked[0] == 0).all(1).nonzero().flatten().tolist()
        assert rows == list(range(frames // 4, frames // 2))


def test_without_masks_features_pass_unchanged():
    features = torch.randn(1, 5, 4)
    none = torch.zeros(1, 0, 2)
    assert torch.equal(apply_masks(features, torch.tensor([5]), none, none), features)
