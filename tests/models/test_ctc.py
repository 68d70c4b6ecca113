from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from muster.models import PRESETS, build
from muster.models.configs import LMUCTCConfig
from muster.models.ctc import Block, DepthwiseConv, Subsample

SPEECH = [name for name in PRESETS if name.startswith("lmu")]
CAUSAL = [name for name in PRESETS if name.endswith("-causal")]
NORMS = ["layer", "batch"]


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def settled(model: nn.Module) -> nn.Module:
    """Running statistics away from zero and one, so that a forgotten one shows."""
    for module in model.modules():
        if hasattr(module, "running_mean"):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model.eval()


@pytest.mark.parametrize(
    ("preset", "low", "high"),
    [
        ("lmu-micro", 0.7e6, 0.9e6),
        ("lmu-micro-causal", 0.7e6, 0.9e6),
        ("lmu-7m", 7.0e6, 7.4e6),
        ("lmu-7m-causal", 7.0e6, 7.4e6),
    ],
)
def test_presets_have_the_size_they_claim(preset: str, low: float, high: float):
    assert low < parameters(build(preset, 29)) < high


@pytest.mark.parametrize("preset", SPEECH)
@torch.no_grad()
def test_a_clip_hears_neither_its_padding_nor_its_neighbours(preset: str):
    for norm in NORMS:
        model = settled(build(preset, 29, blocks=2, norm=norm))
        lengths = torch.tensor([61, 290, 98, 1])
        features = torch.randn(4, 290, 80)
        together, out_lengths = model(features, lengths)
        for garbage in (1e4, float("nan")):
            dirty = features.clone()
            for i, length in enumerate(lengths):
                dirty[i, length:] = garbage
            logits, _ = model(torch.cat([dirty, torch.full((4, 30, 80), garbage)], 1), lengths)
            for i, length in enumerate(out_lengths):
                torch.testing.assert_close(
                    logits[i, :length], together[i, :length], rtol=0, atol=1e-5
                )
        for i, length in enumerate(lengths):
            alone, alone_length = model(features[i : i + 1, :length], lengths[i : i + 1])
            assert alone_length.item() == out_lengths[i].item() == alone.shape[1]
            close = together[i, : out_lengths[i]]
            torch.testing.assert_close(alone[0], close, rtol=0, atol=1e-5)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("preset", ["lmu-micro", "lmu-micro-causal", "lmu-guide"])
def test_training_gradients_ignore_the_padding(preset: str, norm: str):
    lengths = torch.tensor([40, 77])
    features = torch.randn(2, 77, 80)
    gradients = []
    for extra in (0, 50):
        torch.manual_seed(1)
        model = build(preset, 29, blocks=1, norm=norm).double()
        padded = torch.cat([features, torch.full((2, extra, 80), 7.0)], 1).double()
        padded[0, 40:] = extra
        logits, out = model(padded, lengths)
        sum(logits[i, :n].square().sum() for i, n in enumerate(out)).backward()
        gradients.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
        )
    torch.testing.assert_close(*gradients)


def test_frames_are_counted_in_fours_rounded_up():
    model = build("lmu-micro", 29, blocks=1)
    lengths = torch.arange(1, 14)
    assert model.output_lengths(lengths).tolist() == [1] * 4 + [2] * 4 + [3] * 4 + [4]
    logits, out = model(torch.randn(13, 13, 80), lengths)
    assert logits.shape == (13, 4, 29)
    assert out.equal(model.output_lengths(lengths))


@pytest.mark.parametrize("length", [13, 14, 15, 16])
def test_the_front_is_two_strided_convolutions(length: int):
    front = Subsample(6, 5).double()
    x = torch.randn(2, 16, 6, dtype=torch.float64)
    got, _ = front(x, torch.tensor([length, length]))
    y = x[:, :length].transpose(1, 2)
    for conv in front.convs:
        weight = conv.weight.unflatten(1, (3, -1)).transpose(1, 2)
        y = nn.functional.silu(nn.functional.conv1d(y, weight, conv.bias, stride=2, padding=1))
    torch.testing.assert_close(got, y.transpose(1, 2))


@pytest.mark.parametrize("causal", [False, True])
def test_the_depthwise_convolution_is_torchs_conv1d(causal: bool):
    ours = DepthwiseConv(6, 5, causal).double()
    nn.init.normal_(ours.bias)
    x = torch.randn(2, 11, 6, dtype=torch.float64)
    padded = nn.functional.pad(x.transpose(1, 2), ours.pad)
    expected = nn.functional.conv1d(padded, ours.weight.squeeze(2), ours.bias, groups=6)
    torch.testing.assert_close(ours(x), expected.transpose(1, 2))


def streamed(model: nn.Module, features: Tensor, sizes: list[int]) -> Tensor:
    state, out, start = model.stream_state(len(features)), [], 0
    for i, size in enumerate(sizes):
        last = i == len(sizes) - 1
        logits, state = model.stream(features[:, start : start + size], state, last=last)
        out.append(logits)
        start += size
    assert start == features.shape[1]
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("preset", CAUSAL)
@pytest.mark.parametrize("norm", NORMS)
@torch.no_grad()
def test_a_stream_in_any_chunks_gives_the_offline_logits(preset: str, norm: str):
    model = settled(build(preset, 29, blocks=2, norm=norm))
    for time in (129, 130, 131, 132):
        features = torch.randn(2, time, 80)
        offline, _ = model(features, torch.full((2,), time))
        cuts = sorted(torch.randint(0, time + 1, (9,)).tolist())
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, time], strict=True)]
        for chunks in (sizes, [time], [*[1] * 40, time - 40], [time, 0]):
            got = streamed(model, features, chunks)
            torch.testing.assert_close(got, offline, rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_stream_answers_as_soon_as_four_frames_are_there():
    model = build("lmu-micro-causal", 29, blocks=1).eval()
    state, counts = model.stream_state(1), []
    for _ in range(8):
        logits, state = model.stream(torch.randn(1, 1, 80), state)
        counts.append(logits.shape[1])
    assert counts == [0, 0, 0, 1, 0, 0, 0, 1]


def test_a_model_that_looks_ahead_refuses_to_stream():
    model = build("lmu-micro", 29, blocks=1)
    with pytest.raises(ValueError, match="looks ahead"):
        model.stream_state(1)
    with pytest.raises(ValueError, match="looks ahead"):
        model.stream(torch.randn(1, 4, 80), None)


@pytest.mark.parametrize("preset", CAUSAL)
@torch.no_grad()
def test_a_causal_model_does_not_hear_the_future(preset: str):
    model = build(preset, 29, blocks=2).eval()
    features = torch.randn(1, 200, 80)
    later = features.clone()
    later[:, 100:] = 50.0
    lengths = torch.tensor([200])
    before, after = model(features, lengths)[0], model(later, lengths)[0]
    torch.testing.assert_close(before[:, :25], after[:, :25], rtol=0, atol=1e-5)
    assert (before[:, 25] - after[:, 25]).abs().max() > 0.1


def test_autocast_gives_logits_in_the_compute_dtype():
    for preset in ("lmu-micro", "lmu-guide"):
        model = build(preset, 29, blocks=1)
        with torch.autocast("cpu", torch.bfloat16):
            logits, _ = model(torch.randn(2, 90, 80), torch.tensor([90, 50]))
        assert logits.dtype == torch.bfloat16
        logits.float().sum().backward()


def test_every_parameter_of_every_preset_learns():
    for preset in SPEECH:
        model = build(preset, 29, blocks=1)
        logits, _ = model(torch.randn(2, 40, 80), torch.tensor([40, 31]))
        logits.square().sum().backward()
        still = [n for n, p in model.named_parameters() if p.requires_grad and not p.grad.any()]
        assert still == []


def test_blocks_are_named_for_whoever_shards_them():
    for preset in SPEECH:
        model = build(preset, 29, blocks=2)
        assert sum(type(m).__name__ in model.plan.blocks for m in model.modules()) == 2


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean lmu-micro"):
        build("lmu-mikro", 29)


def test_an_unknown_norm_names_the_known_ones():
    with pytest.raises(ValueError, match="layer or batch"):
        build("lmu-micro", 29, norm="group")


def test_an_unknown_override_names_the_fields():
    with pytest.raises(ValueError, match="width"):
        build("lmu-micro", 29, widht=64)


def test_a_causal_model_cannot_be_bidirectional():
    with pytest.raises(ValueError, match="bidirectional"):
        dataclasses.replace(PRESETS["lmu-micro"], causal=True)


def test_a_model_learns_to_spell_a_tone():
    """Two tones, two letters: a few steps of CTC must tell them apart."""
    config = {"width": 32, "blocks": 1, "channels": 4, "order": 4, "mels": 8}
    model = build("lmu-micro", 3, **config)
    assert isinstance(model.blocks[0], Block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    labels = torch.randint(1, 3, (16, 3))
    features = torch.zeros(16, 60, 8)
    for i in range(3):
        features[:, 20 * i : 20 * i + 12] = nn.functional.one_hot(labels[:, i], 8)[:, None].float()
    lengths = torch.full((16,), 60)
    first = last = None
    for _ in range(60):
        logits, out = model(features, lengths)
        log_probs = logits.log_softmax(-1).transpose(0, 1)
        loss = nn.functional.ctc_loss(log_probs, labels, out, torch.full((16,), 3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first = loss.item() if first is None else first
        last = loss.item()
    assert last < 0.1 < first


def test_config_refuses_an_even_centred_kernel():
    with pytest.raises(ValueError, match="odd"):
        LMUCTCConfig(width=8, blocks=1, channels=2, order=2, theta_frames=4, kernel=4, ff_mult=2)
