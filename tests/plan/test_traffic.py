"""Messages of an optimizer step as real ranks send them, against what the planner counts on."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest

from muster.models.configs import DecoderConfig
from muster.parallel.apply import apply
from muster.parallel.layout import layout_for
from muster.planner.dtensor_recorder import DTensorRecorder
from muster.planner.fake_cuda import autocast
from muster.planner.memory import ZERO_LIVE, Choice
from muster.planner.shards import stages
from muster.planner.subject import Subject
from muster.planner.trace import Trace
from muster.planner.traffic import Traffic, data_traffic
from muster.training.optimizer import make_optimizer
from parallel.models import GPT, LLAMA, LR, Maker, make_batch, make_functions, make_recipe

SCALAR = 8  # bytes: norms and flags are not counted


def sent(
    mesh, config: DecoderConfig, distributed: dict[str, Any], precision: str, count: int
) -> Traffic:
    """Of the third step: by then DDP has settled on its buckets. Only between data ranks."""
    recipe = make_recipe(distributed)
    layout = layout_for(recipe.distributed, mesh.world)
    make = lambda named: make_optimizer(recipe.training, named)  # noqa: E731
    engine = apply(Maker(config), mesh.with_layout(layout), recipe, precision, make)
    functions = dataclasses.replace(make_functions(64), autocast=lambda: autocast(precision))
    recorder = DTensorRecorder()
    for _ in range(3):
        recorder.trace = Trace()
        with recorder:
            engine.accumulate([make_batch(config, 2)] * count, functions)
            engine.grad_norm()
            engine.step(LR)
            engine.zero_grad()
    return Counter(
        (m.kind, m.bytes, len(m.ranks))
        for m, _ in recorder.trace.messages
        if m.bytes > SCALAR and len({layout.data_rank(r) for r in m.ranks}) > 1
    )


def totals(traffic: Traffic) -> dict[str, int]:
    found: Counter[str] = Counter()
    for (kind, size, _), times in traffic.items():
        found[kind] += size * times
    return dict(found)


def fsdp(**options: Any) -> dict[str, Any]:
    return {"strategy": "fsdp", "fsdp": options}


CASES: dict[str, tuple[DecoderConfig, dict[str, Any], int, str, int]] = {
    "ddp": (GPT, {"strategy": "ddp", "ddp": {"bucket_mb": 0.01}}, 2, "fp32", 3),
    "fsdp": (GPT, fsdp(), 4, "bf16", 3),
    "keeps": (LLAMA, fsdp(sharding="shard_grad_op"), 2, "fp32", 2),
    "sums each": (GPT, fsdp(reduce_each_micro_batch=True), 2, "bf16", 3),
    "hsdp": (LLAMA, {"strategy": "hsdp"}, 4, "bf16", 2),
    "tensor × ddp": (LLAMA, {"strategy": "tensor", "tensor": 2}, 4, "fp32", 2),
    "tensor × fsdp": (GPT, {"strategy": "hybrid", "tensor": 2}, 4, "bf16", 2),
    "pipeline × fsdp": (LLAMA, {"strategy": "hybrid", "pipeline": 2}, 4, "bf16", 4),
    "context × fsdp": (LLAMA, {"strategy": "fsdp", "context": 2}, 4, "bf16", 2),
    "ddp × context": (GPT, {"strategy": "ddp", "context": 2}, 4, "fp32", 2),
    "zero1": (GPT, {"strategy": "zero1"}, 4, "bf16", 3),
    "zero2": (LLAMA, {"strategy": "zero2"}, 2, "bf16", 3),
    "zero3": (GPT, {"strategy": "zero3"}, 4, "bf16", 2),
}


def planned(name: str, rank: int = 0) -> Traffic:
    config, distributed, world, precision, count = CASES[name]
    recipe = make_recipe(distributed)
    layout, options = layout_for(recipe.distributed, world), recipe.distributed.fsdp
    choice = Choice(
        layout,
        precision,
        rows=2,
        accumulation=count,
        reduce_each=options.reduce_each_micro_batch,
        keep_gathered=options.sharding == "shard_grad_op",
    )
    subject: Any = Subject(recipe, Maker(config))  # type: ignore[arg-type]
    held = stages(subject, layout, tensor_rank=layout.tensor_rank(rank))
    return data_traffic(choice, held[layout.pipeline_rank(rank)])


FULL = ("keeps", "fsdp", "tensor × ddp", "pipeline × fsdp", "zero1", "zero2")
FULL += ("zero3", "tensor × fsdp", "hsdp", "context × fsdp", "ddp × context")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full if n in FULL else ()) for n in CASES]
)
def test_ranks_send_what_was_planned(ranks, name):
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    config, distributed, world, precision, count = CASES[name]
    for rank, found in enumerate(ranks(world)(sent, config, distributed, precision, count)):
        expected = planned(name, rank)
        if name.startswith(("ddp", "zero")):  # in buckets
            assert totals(found) == totals(expected)
        else:
            assert found == expected


def test_zero_gathers_a_large_model_twice_but_for_its_end():
    """The other half is a small model's: all of it waits for the backward pass."""
    (_, distributed, world, *_) = CASES["zero3"]
    wide = dataclasses.replace(LLAMA, width=4096, hidden=16384, layers=8)
    recipe = make_recipe(distributed)
    subject: Any = Subject(recipe, Maker(wide))  # type: ignore[arg-type]
    layout = layout_for(recipe.distributed, world)
    (stage,) = stages(subject, layout)
    assert stage.numel > 2 * ZERO_LIVE
    found = totals(data_traffic(Choice(layout, "bf16", rows=1), stage))
    assert found["all_gather"] == pytest.approx(2 * (2 * stage.numel - ZERO_LIVE) / world, rel=1e-6)


def test_one_rank_sends_nothing():
    recipe = make_recipe()
    subject: Any = Subject(recipe, Maker(GPT))  # type: ignore[arg-type]
    layout = layout_for(recipe.distributed, 1)
    assert data_traffic(Choice(layout, "fp32", rows=1), stages(subject, layout)[0]) == {}
