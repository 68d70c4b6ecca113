"""Where state rests does not change the course of a training."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from parallel.models import GPT, course, make_batch, make_engine, micro_batches, single

# The same sums in another order; see the parity table.
TOLERANCE = 1e-5


def norms(mesh, distributed: dict[str, Any]) -> list[float]:
    engine = make_engine(mesh, GPT, distributed)
    batch = make_batch(GPT, 8)
    found = course(engine, micro_batches(mesh, distributed, batch, 2), batch.units)
    assert offloads(engine, distributed)
    return found


def offloads(engine: Any, distributed: dict[str, Any]) -> bool:
    """Whether the library was really told to; on a CPU the numbers alone cannot show it."""
    if distributed["strategy"] == "fsdp":
        groups = [
            m._get_fsdp_state()._fsdp_param_group
            for m in engine.parts[0].modules()
            if isinstance(m, FSDPModule)
        ]
        return all(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups)
    wanted, zero = distributed["deepspeed"], engine.optimizer
    if distributed["strategy"] == "zero2":
        return bool(zero.cpu_offload)
    return (zero.offload_optimizer, zero.offload_param) == (True, "offload_param" in wanted)


@pytest.fixture(scope="module")
def alone() -> list[float]:
    batch = make_batch(GPT, 8)
    return course(single(GPT), [batch], batch.units)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "fsdp", "fsdp": {"cpu_offload": True}},
        {"strategy": "zero2", "deepspeed": {"offload_optimizer": "cpu"}},
        pytest.param(
            {"strategy": "zero3", "deepspeed": {"offload_optimizer": "cpu"}}, marks=pytest.mark.full
        ),
        {"strategy": "zero3", "deepspeed": {"offload_optimizer": "cpu", "offload_param": "cpu"}},
    ],
    ids=["fsdp", "zero2 optimizer", "zero3 optimizer", "zero3 everything"],
)
def test_offloading_follows_the_course_of_one_process(ranks, alone, options):
    if "zero" in options["strategy"]:
        pytest.importorskip("deepspeed")
    assert alone[0] != pytest.approx(alone[1], rel=1e-3)  # a step that did nothing would show
    for found in ranks(2)(norms, options):
        assert found == pytest.approx(alone, rel=TOLERANCE)
