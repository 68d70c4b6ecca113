"""Checkpointing and compilation of blocks change what is kept and how fast, never the gradient."""

from __future__ import annotations

import dataclasses
import gc
import shutil
import tempfile
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from muster.errors import RecipeError
from muster.models.decoder import Decoder
from muster.parallel.blocks import checkpoint_activations, find_blocks
from parallel.models import (
    GPT,
    LLAMA,
    make_batch,
    make_engine,
    make_functions,
    single,
    whole_gradients,
)

SMALL = dataclasses.replace(GPT, layers=2)


def run(config, **training: Any) -> tuple[float, dict[str, Tensor]]:
    engine = single(config, **training)
    batch = make_batch(config, 4)
    (loss,) = engine.accumulate([batch], make_functions(batch.units))
    return float(loss), whole_gradients(engine)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_checkpointing_gives_the_same_gradient_to_the_bit(config, mode):
    loss, gradients = run(config)
    again, same = run(config, activation_checkpointing=mode)
    assert again == loss
    assert set(same) == set(gradients)
    for name, gradient in gradients.items():
        assert torch.equal(same[name], gradient), name


@pytest.mark.guides
def test_full_keeps_inputs_and_selective_the_products_too():
    rows, time = 16, 8
    state = rows * time * GPT.width * 4
    outside = kept_by_forward(rows, "none", layers=0)
    none, selective, full = (
        kept_by_forward(rows, mode) - outside for mode in ("none", "selective", "full")
    )
    seed = torch.get_rng_state().numel()  # for dropout to fall the same way again
    assert full == GPT.layers * (state + seed)
    attention = state + rows * time * GPT.heads * 4  # its output, a logarithm for each softmax
    up = state * GPT.hidden // GPT.width
    assert selective == full + GPT.layers * (5 * state + attention + up)  # 5: q, k, v, o, down
    assert none > selective


def kept_by_forward(rows: int, mode: Any, layers: int = GPT.layers) -> int:
    """Bytes that a forward pass leaves allocated for the backward pass."""
    model = Decoder(dataclasses.replace(GPT, layers=layers))
    if layers:
        checkpoint_activations(find_blocks(model, ["DecoderBlock"], "here"), mode)
    tokens = make_batch(GPT, rows)["tokens"]
    gc.collect()  # what an earlier forward pass left in cycles would be freed, and counted, in this
    gc.disable()
    try:
        with torch.profiler.profile(profile_memory=True) as profile:
            loss = model(tokens).sum()
    finally:
        gc.enable()
    kept = sum(event.self_cpu_memory_usage for event in profile.events())
    loss.backward()
    return int(kept)


def test_names_stay_under_checkpointing():
    plain, engine = Decoder(GPT), single(GPT, activation_checkpointing="full")
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in engine.parts[0].named_parameters()] == names


def wrap(mesh, names: list[str]) -> list[str]:
    """The modules that FSDP gathers alone."""
    from torch.distributed.fsdp import FSDPModule

    engine = make_engine(mesh, GPT, {"strategy": "fsdp", "fsdp": {"wrap": names}})
    return [n for n, m in engine.parts[0].named_modules() if isinstance(m, FSDPModule)]


def test_an_unknown_class_to_wrap_lists_those_there_are(ranks):
    with pytest.raises(AssertionError) as caught:
        ranks(2)(wrap, ["DecoderBlock", "LlamaDecoderLayer"])
    assert caught.value.kind == RecipeError.__name__
    assert caught.value.message == (
        "distributed.fsdp.wrap: no layer of class LlamaDecoderLayer in Decoder; it has "
        "Attention, DecoderBlock, Embedding, FeedForward, LayerNorm, Linear, ModuleDict"
    )


def test_the_classes_named_are_wrapped(ranks):
    (found, other) = ranks(2)(wrap, ["Attention", "FeedForward"])
    inner = [f"blocks.{i}.{m}" for i in range(4) for m in ("attention", "feed_forward")]
    assert found == other == ["", *inner]


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("aot_eager", marks=pytest.mark.guides),
        pytest.param(
            "inductor",  # the default; its first compilation takes a minute
            marks=[
                pytest.mark.full,
                pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ on a CPU"),
            ],
        ),
    ],
)
def test_compiled_blocks_share_one_graph_and_give_the_same_gradient(monkeypatch, backend):
    loss, gradients = run(SMALL)
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    again, same = run(SMALL, compile=True)
    assert counters["stats"]["unique_graphs"] == 3  # of a block, the last norm, and the head
    assert again == pytest.approx(loss, rel=1e-5)
    largest = max(float(g.abs().max()) for g in gradients.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(same[name], gradient, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_batch_norm_and_recomputed_blocks_are_refused_under_every_strategy(ranks, strategy):
    with pytest.raises(AssertionError, match=r"RecipeError: training\.activation_checkpointing"):
        ranks(2)(recompute_batch_norm, strategy)


def recompute_batch_norm(mesh, strategy: str) -> None:
    from training import make_job

    make_job(
        mesh,
        tempfile.mkdtemp(),
        [
            "model.norm=batch",
            "training.activation_checkpointing=full",
            f"distributed.strategy={strategy}",
        ],
    )
