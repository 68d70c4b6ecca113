"""Messages of one optimizer step, counted and measured by the flight recorder.

gloo carries out a reduce-scatter as an all-reduce of its whole input, so both count as a "sum" here;
their sizes tell them apart.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch

from muster.models.configs import DecoderConfig
from muster.models.decoder import Decoder
from parallel.models import (
    GPT,
    LLAMA,
    LR,
    TIME,
    make_batch,
    make_engine,
    make_functions,
    micro_batches,
)

ROWS = 8
KINDS = {"all_reduce": "sum", "reduce_scatter": "sum", "all_gather": "gather"}
Traffic = Counter[tuple[str, int]]  # (kind, elements that a rank puts in) → times
NORM: Traffic = Counter({("sum", 1): 1})  # the gradient norm of what is in pieces


def recorded() -> list[dict[str, Any]]:
    return json.loads(torch._C._distributed_c10d._dump_fr_trace_json()).get("entries", [])


def kind_of(entry: dict[str, Any]) -> str:
    name = entry["profiling_name"].removeprefix("gloo:").lstrip("_")
    return next((kind for stem, kind in KINDS.items() if name.startswith(stem)), name)


def traffic(mesh, config: DecoderConfig, distributed: dict[str, Any], count: int) -> Any:
    """Of the third step: by then DDP has settled on its buckets."""
    engine = make_engine(mesh, config, distributed)
    batch = make_batch(config, ROWS)
    pieces = micro_batches(mesh, distributed, batch, count)
    for _ in range(3):
        before = max((entry["record_id"] for entry in recorded()), default=-1)
        engine.accumulate(pieces, make_functions(batch.units))
        engine.grad_norm()
        engine.step(LR)
        engine.zero_grad()
    new = [entry for entry in recorded() if entry["record_id"] > before]
    assert len(new) == new[-1]["record_id"] - before, "the recorder's buffer is too small"
    sizes = [(kind_of(e), sum(math.prod(s) for s in e["input_sizes"])) for e in new]
    return Counter(sizes), {dtype for e in new for dtype in e["input_dtypes"]}


def elements(config: DecoderConfig, shards: int = 1) -> tuple[int, int]:
    """What a rank puts in of one block and of everything else, rows padded to equal shards."""
    with torch.device("meta"):
        named = list(Decoder(config).named_parameters())
    padded = {n: math.ceil(p.shape[0] / shards) * p.shape[1:].numel() for n, p in named}
    block = sum(size for n, size in padded.items() if n.startswith("blocks.0."))
    return block, sum(padded.values()) - config.layers * block


def total(config: DecoderConfig) -> int:
    block, rest = elements(config)
    return config.layers * block + rest


@pytest.mark.parametrize("accumulation", [1, 4])
def test_ddp_sends_each_gradient_once_per_optimizer_step(ranks, accumulation):
    for found, _ in ranks(2)(traffic, GPT, {"strategy": "ddp"}, accumulation):
        assert found == {("sum", total(GPT)): 1}


def test_ddp_sends_buckets_of_the_size_asked_for(ranks):
    limit = 0.01  # MB
    options = {"strategy": "ddp", "ddp": {"bucket_mb": limit}}
    for found, _ in ranks(2)(traffic, GPT, options, 4):
        assert {kind for kind, _ in found} == {"sum"}
        assert sum(size * times for (_, size), times in found.items()) == total(GPT)
        largest = GPT.vocab * GPT.width  # a bucket is closed by the parameter that fills it
        assert all(size * 4 < limit * 2**20 + largest * 4 for _, size in found)
        assert found.total() >= 3


@pytest.mark.parametrize(
    ("compression", "dtype"),
    [("bf16", "BFloat16"), pytest.param("fp16", "Half", marks=pytest.mark.full)],
)
def test_compressed_gradients_travel_as_half_as_many_bytes(ranks, compression, dtype):
    options = {"strategy": "ddp", "ddp": {"compression": compression}}
    for found, dtypes in ranks(2)(traffic, GPT, options, 1):
        assert found == {("sum", total(GPT)): 1}
        assert dtypes == {dtype}


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("sharding", ["full_shard", "shard_grad_op"])
def test_fsdp_gathers_each_block_and_reduces_once(ranks, sharding, accumulation):
    """Per micro-step the root once and each block forwards, and backwards if it was given up."""
    options = {"strategy": "fsdp", "fsdp": {"sharding": sharding}}
    block, root = elements(GPT, shards=2)
    passes = 2 if sharding == "full_shard" else 1
    expected: Traffic = Counter(NORM)
    expected["gather", block] += passes * GPT.layers * accumulation
    expected["gather", root] += accumulation
    expected["sum", 2 * block] += GPT.layers
    expected["sum", 2 * root] += 1
    for found, _ in ranks(2)(traffic, GPT, options, accumulation):
        assert found == expected


def test_hsdp_adds_one_sum_of_each_shard_over_the_copies(ranks):
    block, root = elements(GPT, shards=2)
    expected: Traffic = Counter(NORM)
    expected["gather", block] += 2 * GPT.layers
    expected["gather", root] += 1
    for size, times in ((block, GPT.layers), (root, 1)):
        expected["sum", 2 * size] += times  # the reduce-scatter
        expected["sum", size] += times  # over the copies
    for found, _ in ranks(4)(traffic, GPT, {"strategy": "hsdp"}, 1):
        assert found == expected


def tensor_options(sequence: bool, loss: bool) -> dict[str, Any]:
    return {
        "strategy": "tensor",
        "tensor_options": {"sequence_parallel": sequence, "loss_parallel": loss},
    }


def of_the_loss(config: DecoderConfig, split: bool) -> Traffic:
    """Split: the largest logit, the sum of exponentials and the target's logit of every token.
    Else the logits themselves, the vocabulary padded to equal pieces."""
    if split:
        return Counter({("sum", ROWS * TIME): 3})
    return Counter({("gather", ROWS * TIME * math.ceil(config.vocab / 2)): 1})


@pytest.mark.parametrize(
    ("config", "loss"),
    [
        pytest.param(GPT, True, id="gpt-split loss"),
        pytest.param(LLAMA, False, id="llama-whole logits", marks=pytest.mark.full),
        pytest.param(LLAMA, True, id="llama-split loss", marks=pytest.mark.full),
        pytest.param(GPT, False, id="gpt-whole logits", marks=pytest.mark.full),
    ],
)
def test_plain_tensor_parallelism_sums_the_stream_twice_per_block_each_way(ranks, config, loss):
    stream = ROWS * TIME * config.width
    expected = NORM + of_the_loss(config, loss)
    expected["sum", stream] += 2 * config.layers + 1  # forwards; the one is the embedding
    expected["sum", stream] += 2 * config.layers + 1  # backwards; the one is the head
    for found, _ in ranks(2)(traffic, config, tensor_options(False, loss), 1):
        assert found == expected


@pytest.mark.parametrize(
    "config", [pytest.param(GPT, id="gpt", marks=pytest.mark.full), pytest.param(LLAMA, id="llama")]
)
def test_sequence_parallelism_gathers_and_scatters_the_stream(ranks, config):
    """q, k and v share one gathering, as do gate and up. All norms share one sum."""
    stream = ROWS * TIME * config.width
    expected = NORM + of_the_loss(config, True)
    expected["sum", stream] += 1  # the embedding
    expected["gather", stream // 2] += 2 * config.layers + 1  # forwards; the one is the head
    expected["sum", stream] += 2 * config.layers
    expected["gather", stream // 2] += 2 * config.layers + 1  # backwards; the embedding
    expected["sum", stream] += 2 * config.layers + 1  # the head
    vectors = 2 if config.norm == "layer" else 1
    expected["sum", (2 * config.layers + 1) * vectors * config.width] += 1
    for found, _ in ranks(2)(traffic, config, tensor_options(True, True), 1):
        assert found == expected


@pytest.mark.guides
def test_accumulation_repeats_the_stream_but_not_the_norms(ranks):
    once, _ = ranks(2)(traffic, GPT, tensor_options(True, True), 1)[0]
    twice, _ = ranks(2)(traffic, GPT, tensor_options(True, True), 2)[0]
    norms = ("sum", (2 * GPT.layers + 1) * 2 * GPT.width)
    assert twice[norms] == once[norms] == 1
    assert twice[NORM.most_common()[0][0]] == 1
    assert twice.total() - 2 == 2 * (once.total() - 2)
