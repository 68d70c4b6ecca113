"""What each rank really holds, in bytes, against arithmetic on the shapes of the model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from muster.models.configs import DecoderConfig
from muster.models.decoder import Decoder
from muster.parallel.deepspeed_config import packing_order
from parallel.models import GPT, LLAMA, LR, make_batch, make_engine, make_functions, micro_batches

FLOAT = 4
Held = dict[str, int]


def storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind some tensors, what they share counted once."""
    found: dict[int, int] = {}
    for t in tensors:
        storage = (t.to_local() if isinstance(t, DTensor) else t).untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def measure(mesh, config: DecoderConfig, distributed: dict[str, Any]) -> Held:
    """After one step, and with the gradients of the next."""
    engine = make_engine(mesh, config, distributed)
    batch = make_batch(config, 8)
    pieces = micro_batches(mesh, distributed, batch, 2)
    engine.accumulate(pieces, make_functions(batch.units))
    engine.step(LR)
    engine.zero_grad()
    engine.accumulate(pieces, make_functions(batch.units))
    engine.grad_norm()  # torch leaves a cut embedding's gradient whole until here
    parameters = [p for part in engine.parts for p in part.parameters()]
    moments = [t for s in engine.optimizer.state.values() for n, t in s.items() if n != "step"]
    held = {
        "parameters": storages(parameters),
        "gradients": storages(p.grad for p in parameters if p.grad is not None),
        "optimizer": storages(moments),
    }
    engine.zero_grad()
    return held


def shapes(config: DecoderConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: p.shape for name, p in Decoder(config).named_parameters()}


def alike(elements: int) -> Held:
    return {
        "parameters": elements * FLOAT,
        "gradients": elements * FLOAT,
        "optimizer": 2 * elements * FLOAT,
    }


def cut(size: int, parts: int, part: int) -> int:
    """Of `size` rows in equal chunks, those of one part: the last has what is left."""
    chunk = math.ceil(size / parts)
    return max(0, min(size - part * chunk, chunk))


both_models = pytest.mark.parametrize(
    "config", [pytest.param(GPT, id="gpt"), pytest.param(LLAMA, id="llama", marks=pytest.mark.full)]
)


@both_models
def test_ddp_holds_everything_on_every_rank(ranks, config):
    whole = sum(s.numel() for s in shapes(config).values())
    assert ranks(2)(measure, config, {"strategy": "ddp"}) == [alike(whole)] * 2


@pytest.mark.parametrize(
    ("strategy", "shards"),
    [
        pytest.param("fsdp", 4, marks=pytest.mark.full, id="fsdp 4"),
        pytest.param("hsdp", 2, id="hsdp 2 × 2"),
    ],
)
def test_fsdp_holds_a_shard_of_everything(ranks, strategy, shards):
    """Rows are padded to equal shards where they travel, not in the optimizer."""
    held = ranks(4)(measure, GPT, {"strategy": strategy})
    parts = shapes(GPT).values()
    padded = sum(math.ceil(s[0] / shards) * s[1:].numel() for s in parts)
    for rank, found in enumerate(held):
        exact = sum(cut(s[0], shards, rank % shards) * s[1:].numel() for s in parts)
        assert found == alike(padded) | {"optimizer": 2 * exact * FLOAT}
    assert padded < 1.03 * sum(s.numel() for s in parts) / shards


def on_tensor_rank(name: str, shape: torch.Size, rank: int) -> int:
    module, kind = name.rsplit(".", 2)[-2:]
    if module in ("q", "k", "v", "up", "gate", "tokens", "head"):
        return cut(shape[0], 2, rank) * shape[1:].numel()
    if module in ("o", "down") and kind == "weight":
        return shape[0] * cut(shape[1], 2, rank)
    return shape.numel()  # norms, positions, biases of sums


@pytest.mark.parametrize("sequence", [True, False], ids=["sequence parallel", "plain"])
@both_models
def test_tensor_parallelism_halves_the_matrices_and_keeps_the_norms(ranks, config, sequence):
    options = {"strategy": "tensor", "tensor_options": {"sequence_parallel": sequence}}
    for rank, found in enumerate(ranks(2)(measure, config, options)):
        here = sum(on_tensor_rank(n, s, rank) for n, s in shapes(config).items())
        assert found == alike(here)
    assert here < 0.55 * sum(s.numel() for s in shapes(config).values())


@both_models
def test_a_pipeline_rank_holds_its_layers_alone(ranks, config):
    first = ("embed.", "blocks.0.", "blocks.1.")
    last = ("blocks.2.", "blocks.3.", "norm.", "embed.tokens." if config.tied else "head.")
    for mine, found in zip(
        (first, last), ranks(2)(measure, config, {"strategy": "pipeline"}), strict=True
    ):
        assert found == alike(
            sum(s.numel() for n, s in shapes(config).items() if n.startswith(mine))
        )


@pytest.mark.full
def test_tensor_times_fsdp_holds_a_quarter_of_each_matrix(ranks):
    even = dataclasses.replace(GPT, vocab=36, hidden=24)
    held = ranks(4)(measure, even, {"strategy": "hybrid", "tensor": 2})
    matrices = [n for n in shapes(even) if n.endswith(("q.weight", "up.weight", "o.weight"))]
    assert len(matrices) == 3 * even.layers
    expected = 0
    for name, shape in shapes(even).items():
        expected += math.ceil(on_tensor_rank(name, shape, 0) / 2)
    assert held == [alike(expected)] * 4


def measure_zero(mesh, stage: int) -> dict[str, int]:
    """DeepSpeed's own buffers. `between` is gradients after the first of two micro-steps."""
    options = {"strategy": f"zero{stage}"}
    engine: Any = make_engine(mesh, GPT, options)
    zero = engine.optimizer
    batch = make_batch(GPT, 8)
    pieces = micro_batches(mesh, options, batch, 2)
    parameters = list(engine.parts[0].parameters())
    held: dict[str, int] = {}

    def gradients() -> int:
        kept = [p.grad for p in parameters if p.grad is not None]
        for groups in (zero.averaged_gradients, getattr(zero, "all_grad_tensors", {})):
            kept += [g for group in groups.values() for g in group or () if g is not None]
        return sum(g.numel() for g in kept) * FLOAT

    def look(batch):
        if batch is pieces[1]:
            held["between"] = gradients()
        return batch

    functions = dataclasses.replace(make_functions(batch.units), prepare=look)
    engine.accumulate(pieces, functions)
    held["gradients"] = gradients()
    engine.step(LR)
    masters = (
        zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
    )
    held |= {
        "parameters": storages(p.ds_tensor if stage == 3 else p for p in parameters),
        "gathered": storages(parameters) if stage == 3 else 0,
        "masters": storages(masters),
        "optimizer": storages(
            t for s in zero.optimizer.state.values() for n, t in s.items() if n != "step"
        ),
    }
    return held


def touching(rank: int) -> int:
    """Elements of the parameters that lie, wholly or in part, in a rank's half of either group:
    matrices, which decay, and vectors, which do not."""
    found = 0
    for matrices in (True, False):
        sizes = [s.numel() for s in shapes(GPT).values() if (len(s) > 1) == matrices]
        sizes.sort(key=packing_order)
        start, half = 0, sum(sizes) // 2
        for size in sizes:
            inside = start < half if rank == 0 else start + size > half
            found += size if inside else 0
            start += size
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_stage_of_zero_shards_one_thing_more(ranks, stage):
    pytest.importorskip("deepspeed")
    whole = sum(s.numel() for s in shapes(GPT).values()) * FLOAT
    for rank, found in enumerate(ranks(2)(measure_zero, stage)):
        # Stage 2 adds up whole parameters, also the one that the border between two ranks cuts.
        between = {1: whole, 2: touching(rank) * FLOAT, 3: whole // 2}[stage]
        assert between == whole or between < 0.55 * whole
        assert found == {
            "parameters": whole if stage < 3 else whole // 2,
            "gathered": 0,
            "between": between,
            "gradients": whole // 2,  # once they are summed, no stage keeps the others'
            "masters": whole // 2,
            "optimizer": 2 * whole // 2,
        }
