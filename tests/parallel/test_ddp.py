"""DDP's options: what they change and what they must not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel.models import (
    GPT,
    make_batch,
    make_engine,
    make_functions,
    micro_batches,
    single,
    whole_gradients,
)


def gradients(mesh, ddp: dict[str, Any], count: int, **training: Any):
    """Of the second step, when every option has had its say."""
    distributed = {"strategy": "ddp", "ddp": ddp}
    engine = make_engine(mesh, GPT, distributed, **training)
    batch = make_batch(GPT, 8)
    pieces = micro_batches(mesh, distributed, batch, count)
    for _ in range(2):
        engine.zero_grad()
        engine.accumulate(pieces, make_functions(batch.units))
    return whole_gradients(engine)


@pytest.fixture(scope="module")
def alone():
    engine, batch = single(GPT), make_batch(GPT, 8)
    engine.accumulate([batch], make_functions(batch.units))
    return whole_gradients(engine)


def distance(one, other) -> float:
    """Relative, of all gradients together."""
    assert set(one) == set(other)
    apart = sum(float((one[n] - other[n]).square().sum()) for n in one)
    return (apart / sum(float(g.square().sum()) for g in one.values())) ** 0.5


@pytest.mark.parametrize(
    ("ddp", "count"),
    [
        ({}, 2),
        ({"static_graph": True}, 1),
        ({"find_unused_parameters": True}, 2),
        ({"bucket_mb": 0.001}, 2),
    ],
    ids=["default", "static graph", "unused", "small buckets"],
)
def test_exact_options_give_the_gradient_of_one_process(ranks, alone, ddp, count):
    for found in ranks(2)(gradients, ddp, count):
        assert distance(alone, found) < 1e-6


def build_accumulating(mesh, ddp) -> None:
    make_engine(mesh, GPT, {"strategy": "ddp", "ddp": ddp}, gradient_accumulation_steps=2)


def test_a_static_graph_cannot_accumulate(ranks):
    with pytest.raises(AssertionError, match=r"RecipeError: distributed\.ddp\.static_graph: true"):
        ranks(2)(build_accumulating, {"static_graph": True})


@pytest.mark.parametrize(("compression", "digits"), [("bf16", 2**-8), ("fp16", 2**-11)])
def test_compression_rounds_and_no_more(ranks, alone, compression, digits):
    """Each rank's share and the sum of two are rounded to the nearest of so many digits."""
    first, second = ranks(2)(gradients, {"compression": compression}, 1)
    assert digits / 10 < distance(alone, first) < 2 * digits
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_checkpointing_under_ddp_gives_the_same_gradient(ranks, alone):
    def same(found) -> bool:
        return distance(alone, found) < 1e-6

    assert all(map(same, ranks(2)(checkpointed)))


def checkpointed(mesh):
    return gradients(mesh, {}, 2, activation_checkpointing="full")
