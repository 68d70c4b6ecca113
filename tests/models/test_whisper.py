from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.whisper.modeling_whisper import sinusoids as their_sinusoids

from muster.models import PRESETS, build
from muster.models.configs import WhisperConfig
from muster.models.whisper.model import SOURCE_POSITIONS, FreshWhisper, Whisper, sinusoids
from muster.models.whisper.plan import POSITIONS_PER_TOKEN
from whisper_reference import VOCAB, features, fill, make, ours, their_logits, tokens

CPU = torch.device("cpu")
SMALL = WhisperConfig(VOCAB, 32, 2, 4, 56, 3, 2, 72, mels=10, source_positions=30)


def loss(logits: Tensor, said: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), said[:, 1:].flatten())


def gradient_norm(model: torch.nn.Module) -> float:
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


@torch.no_grad()
def test_logits_are_those_of_transformers(tmp_path: Path):
    theirs = make()
    expected = their_logits(theirs, features(), tokens())
    assert expected.std() > 0.5
    assert_close(ours(theirs, tmp_path)(features(), tokens()), expected, 1e-5)


@pytest.mark.parametrize("frames", [2, 34, 58])
@torch.no_grad()
def test_a_shorter_window_gives_what_a_shorter_model_of_transformers_gives(
    frames: int, tmp_path: Path
):
    whole = make()
    state = whole.state_dict()
    state[SOURCE_POSITIONS] = state[SOURCE_POSITIONS][: frames // 2]
    short = make(max_source_positions=frames // 2)
    short.load_state_dict(state)
    heard = features(frames=frames)
    expected = their_logits(short, heard, tokens())
    assert_close(ours(whole, tmp_path)(heard, tokens()), expected, 1e-5)


@pytest.mark.parametrize("frames", [0, 7, 62])
def test_windows_that_whisper_cannot_take_are_refused(frames: int):
    with pytest.raises(ValueError, match=rf"{frames} frames.*even number of at most 60"):
        Whisper(SMALL)(torch.zeros(1, frames, 10), tokens(1))


def test_gradients_are_those_of_transformers(tmp_path: Path):
    theirs = make()
    model = ours(theirs, tmp_path)
    loss(their_logits(theirs, features(), tokens()), tokens()).backward()
    loss(model(features(), tokens()), tokens()).backward()
    assert gradient_norm(model) == pytest.approx(gradient_norm(theirs), rel=1e-5)
    mine = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in theirs.named_parameters():
        if name == SOURCE_POSITIONS:
            assert mine[name] is None
            continue
        assert_close(mine[name], parameter.grad, 1e-5)


def test_a_frozen_encoder_has_no_gradients_and_the_decoder_all_of_them(tmp_path: Path):
    model = ours(make(), tmp_path)
    frozen = Whisper(model.config, freeze_encoder=True)
    frozen.load_state_dict(model.state_dict())
    for each in (model, frozen):
        loss(each(features(), tokens()), tokens()).backward()
    for (name, free), still in zip(model.named_parameters(), frozen.parameters(), strict=True):
        if name.startswith("model.encoder."):
            assert not still.requires_grad
            assert still.grad is None
        else:
            assert_close(still.grad, free.grad, 0)


def test_a_frozen_encoder_runs_without_gradients_and_the_decoder_with_them():
    model = Whisper(SMALL, freeze_encoder=True)
    recording = {}
    for name, part in model.model.items():
        part.register_forward_pre_hook(
            lambda *_, name=name: recording.update({name: torch.is_grad_enabled()})
        )
    assert model(features(), tokens()).requires_grad
    assert recording == {"encoder": False, "decoder": True}


@torch.no_grad()
def test_rows_of_a_batch_do_not_influence_each_other(tmp_path: Path):
    model = ours(make(), tmp_path)
    together = model(features(), tokens())
    for row in range(3):
        alone = model(features()[row : row + 1], tokens()[row : row + 1])
        assert_close(together[row : row + 1], alone, 1e-5)


@torch.no_grad()
def test_a_token_does_not_see_those_after_it(tmp_path: Path):
    model = ours(make(), tmp_path)
    assert_close(model(features(), tokens())[:, :9], model(features(), tokens()[:, :9]), 1e-5)


@pytest.mark.guides
def test_compiled_layers_compute_the_same(tmp_path: Path):
    model = ours(make(), tmp_path)
    with torch.no_grad():
        expected = model(features(), tokens())
    others = [dict(model.named_modules())[name] for name in model.plan.compiled]
    blocks = [m for m in model.modules() if type(m).__name__ in model.plan.blocks]
    assert len(blocks) == 5
    for module in (*blocks, *others):
        module.forward = torch.compile(module.forward, backend="aot_eager", fullgraph=True)
    assert_close(model(features(), tokens()), expected, 1e-5)


def test_states_lie_row_by_row_in_every_layer():
    """A layer keeps the layout of its input."""
    model, seen = Whisper(SMALL), []
    for module in model.modules():
        if type(module).__name__ in model.plan.blocks:
            module.register_forward_hook(lambda _, given, out: seen.extend((given[0], out)))
    model(features(), tokens())
    assert len(seen) == 10
    assert all(states.is_contiguous() for states in seen)


def test_dropout_works_in_training_alone():
    model = Whisper(WhisperConfig(**vars(SMALL) | {"dropout": 0.5}))
    same = [model(features(), tokens()) for _ in range(2)]
    assert not torch.equal(*same)
    model.eval()
    same = [model(features(), tokens()) for _ in range(2)]
    assert torch.equal(*same)


def test_fresh_weights_follow_seed_and_name_and_positions_are_sines():
    model = fill(Whisper(SMALL), FreshWhisper(3)).requires_grad_(False)
    for name, p in model.named_parameters():
        if name == SOURCE_POSITIONS:
            assert_close(p, their_sinusoids(30, 32), 1e-6)
        elif name.endswith("bias"):
            assert not p.any()
        elif "layer_norm" in name:
            assert (p == 1).all()
        else:
            gain = 2 if ".conv" in name else 1  # the GELU behind it halves
            spread = 0.02 if "embed" in name else gain * p[0].numel() ** -0.5
            assert float(p.std()) == pytest.approx(spread, rel=0.15), name
    shape, region = (30, 32), (slice(4, 9), slice(None))
    for name in (SOURCE_POSITIONS, "model.decoder.layers.0.fc1.weight"):
        whole = FreshWhisper(3).read(name, shape, (slice(None),) * 2, CPU)
        assert torch.equal(FreshWhisper(3).read(name, shape, region, CPU), whole[4:9])
    assert not torch.equal(
        FreshWhisper(4).read(name, shape, region, CPU),
        FreshWhisper(3).read(name, shape, region, CPU),
    )
    assert_close(sinusoids(1500, 384), their_sinusoids(1500, 384), 1e-6)


@pytest.mark.parametrize(
    ("preset", "millions"),  # as OpenAI's own table gives them
    [("tiny", 39), ("base", 74), ("small", 244), ("medium", 769), ("large-v3", 1550)],
)
def test_presets_have_the_published_sizes(preset: str, millions: int):
    with torch.device("meta"):
        model = build(f"whisper-{preset}")
    count = sum(p.numel() for p in model.parameters())
    assert count / 1e6 == pytest.approx(millions, rel=0.05)


def test_the_micro_preset_is_small():
    model = build("whisper-micro")
    assert sum(p.numel() for p in model.parameters()) < 2e6
    assert PRESETS["whisper-micro"].source_positions == 1500


def test_the_plan_counts_the_multiplications_of_every_layer():
    model = Whisper(SMALL)
    plan, matrices = model.plan, {}
    for name, p in model.named_parameters():
        if name.endswith("weight") and p.ndim > 1 and "embed" not in name:
            matrices[name] = p.numel()
    assert plan.blocks == ("WhisperEncoderLayer", "WhisperDecoderLayer")
    assert (plan.layers, plan.embeds) == (5, SMALL.encoder_layers)

    def total(*words: str) -> int:
        return sum(n for name, n in matrices.items() if all(w in name for w in words))

    second, decoder = total("encoder.layers.1"), "decoder.layers.1"
    heard = total(decoder, "encoder_attn.k_proj") + total(decoder, "encoder_attn.v_proj")
    middle = heard + (total(decoder) - heard) // POSITIONS_PER_TOKEN
    head = SMALL.vocab * SMALL.width // POSITIONS_PER_TOKEN
    stem = 2 * total("conv1") + total("conv2")  # two frames for each position
    assert plan.costs == (stem + second, second, middle, middle, middle + head)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="decoder_heads 5"):
        WhisperConfig(VOCAB, 32, 2, 4, 56, 3, 5, 72)


def assert_close(found: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
