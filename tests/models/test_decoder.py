from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from muster.models import PRESETS
from muster.models.attention import Cache, attention_mask
from muster.models.configs import DecoderConfig
from muster.models.decoder import Decoder, Part, initial_std
from muster.models.weights import FreshWeights

CPU = torch.device("cpu")
GPT2 = DecoderConfig(61, 3, 32, 4, 56, positions=40)
LLAMA = DecoderConfig(
    61,
    3,
    32,
    4,
    56,
    kv_heads=2,
    positions=40,
    position="rotary",
    norm="rms",
    activation="swiglu",
    bias=False,
    qkv_bias=False,
    tied=False,
)
CONFIGS = {"gpt2": GPT2, "llama": LLAMA, "windowed": replace(LLAMA, window=5)}
TOKENS = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(1))


def model_of(config: DecoderConfig) -> Decoder:
    """Weights large enough that attention picks, so that a wrong mask shows."""
    model = Decoder(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    return model


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("pieces", [[20], [1] * 20, [7, 1, 1, 11], [3, 8, 9]])
@torch.no_grad()
def test_with_a_cache_pieces_give_the_logits_of_the_whole(name: str, pieces: list[int]):
    model, cache = model_of(CONFIGS[name]), Cache()
    out = torch.cat([model(part, cache=cache) for part in TOKENS.split(pieces, dim=1)], dim=1)
    assert cache.length == 20
    assert_close(out, model(TOKENS))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("cuts", [[0, 3], [0, 1, 3], [0, 1, 2, 3]])
@torch.no_grad()
def test_parts_in_a_row_are_the_whole(name: str, cuts: list[int]):
    config, whole = CONFIGS[name], model_of(CONFIGS[name])
    state, documents = whole.state_dict(), (torch.arange(20) // 9).expand(2, -1)
    x, named = TOKENS, set()
    for start, stop in itertools.pairwise(cuts):
        part = Decoder(config, Part(start, stop, config.layers)).eval()
        named |= part.state_dict().keys()
        part.load_state_dict({key: state[key] for key in part.state_dict()})
        x = part(x, documents=documents)
    assert named == state.keys()
    assert_close(x, whole(TOKENS, documents=documents))


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_documents_in_one_sequence_are_as_if_alone(name: str):
    model, lengths = model_of(CONFIGS[name]), [7, 1, 12]
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).expand(2, -1)
    together = model(TOKENS, positions=positions, documents=documents)
    alone = torch.cat([model(part) for part in TOKENS.split(lengths, dim=1)], dim=1)
    assert_close(together, alone)
    assert (together - model(TOKENS)).abs().max() > 0.1


def test_a_window_lets_a_token_see_itself_and_those_before_it():
    mask = attention_mask(CONFIGS["windowed"], 8, 0, None, CPU)
    assert mask is not None
    for query in range(8):
        assert mask[query].nonzero().flatten().tolist() == list(range(max(0, query - 4), query + 1))
    assert attention_mask(CONFIGS["windowed"], 5, 0, None, CPU) is None  # the plain causal kernel
    assert attention_mask(CONFIGS["windowed"], 1, 3, None, CPU) is None
    step = attention_mask(CONFIGS["windowed"], 1, 9, None, CPU)
    assert step is not None
    assert step.tolist() == [[False] * 5 + [True] * 5]


@torch.no_grad()
def test_a_window_forgets_what_lies_before_it():
    model = model_of(replace(CONFIGS["windowed"], layers=1))
    other = TOKENS.clone()
    other[:, 0] = (other[:, 0] + 1) % 61
    changed = (model(TOKENS) - model(other)).abs().amax((0, 2)) > 1e-6
    assert changed.tolist() == [True] * 5 + [False] * 15


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_fresh_weights_are_drawn_by_seed_and_name_alone(name: str):
    config = CONFIGS[name]
    spread = partial(initial_std, config)
    for parameter, value in Decoder(config).named_parameters():
        shape, everything = tuple(value.shape), (slice(None),) * value.ndim
        whole = FreshWeights(3, spread).read(parameter, shape, everything, CPU)
        assert whole.shape == shape
        region = tuple(slice(n // 3, n - 1) for n in shape)
        torch.rand(5)  # what else was drawn does not matter
        part = FreshWeights(3, spread).read(parameter, shape, region, CPU)
        assert torch.equal(part, whole[region])
        if spread(parameter) is None:
            assert (whole == (0.0 if parameter.endswith("bias") else 1.0)).all()
            continue
        for seed, called in ((4, parameter), (3, f"other.{parameter}")):
            other = FreshWeights(seed, spread).read(called, shape, everything, CPU)
            assert not torch.equal(other, whole)


def test_what_enters_the_residual_stream_starts_smaller():
    assert initial_std(GPT2, "blocks.0.attention.q.weight") == 0.02
    assert initial_std(GPT2, "blocks.2.attention.o.weight") == 0.02 / 6**0.5
    assert initial_std(GPT2, "blocks.2.feed_forward.down.weight") == 0.02 / 6**0.5
    assert initial_std(GPT2, "blocks.0.feed_forward_norm.weight") is None
    assert initial_std(GPT2, "norm.weight") is None
    assert initial_std(GPT2, "embed.positions.weight") == 0.02


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [("gpt2", 124_439_808), ("llama-7b", 6_738_415_616), ("llama-3-8b", 8_030_261_248)],
)
def test_presets_have_the_published_number_of_parameters(preset: str, parameters: int):
    with torch.device("meta"):
        model = Decoder(PRESETS[preset])
    assert sum(p.numel() for p in model.parameters()) == parameters


@torch.no_grad()
def test_a_tied_head_is_the_embedding_and_no_parameter_of_its_own():
    model = model_of(replace(GPT2, layers=0))
    assert not any(name.startswith("head") for name, _ in model.named_parameters())
    tokens, places = model.embed.tokens.weight, model.embed.positions.weight
    x = F.layer_norm(tokens[TOKENS] + places[:20], (32,), model.norm.weight, model.norm.bias)
    assert_close(model(TOKENS), x @ tokens.T)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="heads 4 is not a multiple of kv_heads 3"):
        replace(LLAMA, kv_heads=3)
    with pytest.raises(ValueError, match="head_size 7 is odd"):
        replace(LLAMA, head_size=7)


@torch.no_grad()
def test_under_autocast_rms_norms_have_weights_and_inputs_in_bfloat16(monkeypatch):
    """With float32 weights torch's kernel on GPUs is not one but many."""
    real, seen = F.rms_norm, []

    def spy(x, shape, weight, eps):
        seen.append((x.dtype, weight.dtype))
        return real(x, shape, weight, eps)

    monkeypatch.setattr(F, "rms_norm", spy)
    with torch.autocast("cpu", torch.bfloat16):
        model_of(LLAMA)(TOKENS)
    assert seen == [(torch.bfloat16, torch.bfloat16)] * (2 * LLAMA.layers + 1)
