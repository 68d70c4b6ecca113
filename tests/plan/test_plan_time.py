"""Seconds: rooflines, rings, pipelines, and that the parts add up."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from muster.hardware import catalogue
from muster.parallel.layout import Layout
from muster.planner.kernels import (
    BETWEEN_S,
    HOST,
    LAUNCH_US,
    MATRIX,
    SHORTEST_S,
    STREAM,
    Speeds,
    host_seconds,
)
from muster.planner.memory import Choice
from muster.planner.op_cost import OpCost
from muster.planner.planner import split_axes
from muster.planner.time import (
    GATHER_CALLS,
    HOOK_CALLS,
    IDLE_S,
    STEP_CALLS,
    SUM_CALLS,
    Cluster,
    MicroBatchTime,
    _sharding,
    collective,
    micro_batch_time,
    step_time,
)
from plan.subjects import GPT, planner, subject

H100 = catalogue.find("h100")
ONCE = MicroBatchTime(matrices=0.06, memory=0.03, tensor=0.0, host=0.01)


def stage_of(layout=None):
    return planner(subject(*GPT)).stages(layout or Layout())[0]


def step(choice: Choice, once: MicroBatchTime = ONCE, gpus: int = 8, **more):
    cluster = Cluster(H100, gpus, 8)
    return step_time(choice, stage_of(choice.layout), once, cluster, **more)


def test_a_kernel_takes_as_long_as_its_dearer_half():
    speeds = Speeds.of(H100)
    moving = OpCost("add", "memory", 0.0, 3e9, "float32")
    computing = OpCost("mm", "matrix", 1e13, 1e6, "bfloat16", (1, 8192, 8192, 8192))
    assert speeds.seconds(moving) > 3e9 / (H100.memory_gb_per_s * 1e9)
    assert speeds.seconds(computing) == pytest.approx(
        1e13 / (MATRIX * H100.matrix_tflops["bf16"] * 1e12), rel=0.01
    )
    slow = replace(computing, dtype="float32")
    assert speeds.seconds(slow) > 5 * speeds.seconds(computing)
    assert speeds.seconds(replace(moving, bytes=1.0)) == pytest.approx(SHORTEST_S + BETWEEN_S)


def test_what_was_measured_goes_before_the_peak():
    """A bench reaches 69 % and 88 % of an H200's peaks; a device that does so too is as planned."""
    peaks = Speeds.of(H100)
    same = {
        "bf16_tflops": 0.69 * H100.matrix_tflops["bf16"],
        "memory_gb_per_s": 0.88 * H100.memory_gb_per_s,
    }
    alike = Speeds.of(replace(H100, measured=same))
    assert alike.matrix["bf16"] == pytest.approx(peaks.matrix["bf16"])
    assert alike.bytes == pytest.approx(peaks.bytes)
    half = Speeds.of(
        replace(H100, measured={k: v / 2 for k, v in same.items()} | {"launch_us": 3.0})
    )
    assert half.matrix["bf16"] == pytest.approx(peaks.matrix["bf16"] / 2)
    assert half.matrix["fp32"] == peaks.matrix["fp32"]
    assert half.bytes == pytest.approx(peaks.bytes / 2)
    assert half.launch_s == 3e-6
    assert peaks.launch_s == LAUNCH_US * 1e-6
    assert peaks.bytes == STREAM * H100.memory_gb_per_s * 1e9


def test_collectives_follow_the_bus_bandwidth_of_nccl_tests():
    """all_reduce moves 2 (n − 1) / n of the array, the others (n − 1) / n."""
    assert collective("all_reduce", 8e9, 8, 1e9) == pytest.approx(2 * 7 / 8 * 8, rel=1e-3)
    assert collective("all_gather", 8e9, 8, 1e9) == pytest.approx(7 / 8 * 8, rel=1e-3)
    assert collective("all_reduce", 8e9, 1, 1e9) == 0.0


def test_the_network_counts_where_ranks_sit_on_several_machines():
    cluster = Cluster(H100, 64, 8)
    inside, across = cluster.bandwidth(8), cluster.bandwidth(64)
    assert inside == pytest.approx(0.8 * H100.link_gb_per_s * 1e9)
    assert across == min(inside, 8 * 0.8 * H100.network_gb_per_s * 1e9)
    one_each = cluster.bandwidth(8, stride=8)  # every rank on another machine, alone with its card
    assert one_each == pytest.approx(0.8 * H100.network_gb_per_s * 1e9)
    assert cluster.nodes == 8


def test_the_parts_of_a_step_add_up():
    duration = step(Choice(Layout(replicate=8), "bf16", rows=2, accumulation=3))
    assert duration.total == pytest.approx(sum(vars(duration).values()))
    assert duration.matrices == pytest.approx(3 * 0.06)
    assert duration.memory == pytest.approx(3 * 0.03)


def test_a_device_waits_for_a_host_that_is_slower():
    quick = step(Choice(Layout(), "bf16", rows=1), gpus=1)
    slow = step(Choice(Layout(), "bf16", rows=1), replace(ONCE, host=0.2), gpus=1)
    outside = STEP_CALLS * HOST["op"] * LAUNCH_US * 1e-6
    assert quick.host == 0
    assert slow.host == pytest.approx(0.2 + outside - 0.09 - slow.optimizer)
    assert slow.total == pytest.approx(0.2 + outside), "the device is never waited for"


def test_zero_waits_for_the_device_at_every_step():
    assert step(Choice(Layout(shard=8, zero=2), "bf16", rows=1)).host == pytest.approx(IDLE_S)


def test_a_pipeline_waits_while_it_fills_and_drains():
    layout = Layout(pipeline=4)
    few = step(Choice(layout, "bf16", rows=1, microbatches=4), gpus=4)
    many = step(Choice(layout, "bf16", rows=1, microbatches=16), gpus=4)
    assert few.bubble == many.bubble == pytest.approx(3 * 0.09)
    assert few.bubble / few.total > many.bubble / many.total


def test_messages_hide_under_computing_but_never_all_of_them():
    choice = Choice(Layout(shard=8), "bf16", rows=1)
    hidden, exposed = step(choice), step(choice, MicroBatchTime(1e-6, 1e-6, 0.0, 0.0))
    assert 0 < hidden.data_parallel < exposed.data_parallel


def test_summing_every_micro_batch_costs_more_than_summing_once():
    choice = Choice(Layout(shard=8), "bf16", rows=1, accumulation=8)
    bare = MicroBatchTime(1e-6, 1e-6, 0.0, 0.0)
    assert step(replace(choice, reduce_each=True), bare).data_parallel > (
        step(choice, bare).data_parallel
    )


def test_offload_pays_for_the_bus_and_the_hosts_processor():
    near = step(Choice(Layout(shard=8), "bf16", rows=1))
    far = step(Choice(Layout(shard=8), "bf16", rows=1, offload="all"))
    assert far.optimizer > 10 * near.optimizer
    assert far.data_parallel > near.data_parallel


def test_samples_that_load_slower_than_a_step_are_waited_for():
    choice = Choice(Layout(), "bf16", rows=1)
    assert step(choice, gpus=1, loading=0.01).loading == 0.0
    late = step(choice, gpus=1, loading=5.0)
    assert late.total == pytest.approx(5.0, rel=0.01)


def test_a_load_is_tallied_by_kind():
    plans = planner(subject(*GPT))
    load = plans._workload(
        plans._mode(Choice(Layout(), "bf16", rows=4)), stage_of(), 4, costliest=True
    )
    found = micro_batch_time(load, plans.cluster)
    assert found.matrices > 0
    assert found.memory > 0
    assert found.tensor == 0
    assert found.host == pytest.approx(load.calls["op"] * HOST["op"] * LAUNCH_US * 1e-6)
    assert load.calls["op"] > 2 * load.block_calls["op"] > 0


def test_graphs_are_used_where_the_host_is_slower_than_the_device():
    """Without launching; with several micro-batches, a second set of gradients."""
    alone = Cluster(H100, 1, 1)
    for rows, count, used in ((1, 1, True), (1, 4, True), (4096, 1, False)):
        plans = {}
        choice = Choice(Layout(), "bf16", rows, accumulation=count)
        for graphs in ("auto", "false"):
            thing = subject(*GPT, f"training.cuda_graphs={graphs}")
            plans[graphs] = planner(thing).on(alone).evaluate(choice)
        auto, launched = plans["auto"], plans["false"]
        assert (auto.duration.total < launched.duration.total) == used
        assert used == (launched.duration.host > 0)
        assert (auto.memory.allocated > launched.memory.allocated) == (used and count > 1)


@pytest.mark.parametrize("matrices", [4, 12])
@pytest.mark.parametrize(
    ("settings", "counted"),
    [
        ({}, [HOOK_CALLS, GATHER_CALLS, GATHER_CALLS, SUM_CALLS]),
        ({"sums": False}, [HOOK_CALLS, GATHER_CALLS, GATHER_CALLS]),
        ({"sums": False, "gathers": False}, [HOOK_CALLS]),
    ],
)
def test_operations_that_fsdp_adds_are_counted(matrices, settings, counted):
    """As torch launches them, beside the model's own."""
    with split_axes(8, 1) as axes:
        added = [
            _operations(n, matrices, axes.tensor, **settings) - _operations(n, matrices, None)
            for n in (2, 3)
        ]
    expected = sum(group + matrices * each for group, each in counted)
    assert added[1] - added[0] == pytest.approx(expected, rel=0.1)


def test_fsdp_launches_as_often_as_it_gathers_and_sums():
    layout, speeds = Layout(shard=8), Speeds.of(H100)
    stage = stage_of(layout)

    def counted(hooks: int, gathers: int, sums: int) -> object:
        parts = [(hooks, HOOK_CALLS), (gathers, GATHER_CALLS), (sums, SUM_CALLS)]
        sizes = len(stage.groups()), len(stage.parameters)
        calls = sum(n * (each * sizes[0] + one * sizes[1]) for n, (each, one) in parts)
        return pytest.approx(host_seconds({"op": calls}, speeds))

    def launching(**fields: object) -> float:
        return _sharding(Choice(layout, "bf16", 1, **fields), stage, speeds)

    assert launching() == counted(1, 2, 1)
    assert launching(accumulation=4) == counted(4, 8, 1)
    assert launching(accumulation=4, reduce_each=True) == counted(4, 8, 4)
    assert launching(keep_gathered=True) == counted(1, 1, 1)
    assert _sharding(Choice(Layout(replicate=8), "bf16", 1), stage, speeds) == 0.0


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def _operations(
    blocks: int,
    matrices: int,
    shards: DeviceMesh | None,
    *,
    sums: bool = True,
    gathers: bool = True,
) -> int:
    """Of the second step of a model in bfloat16."""
    layers = [nn.Linear(8, 8, bias=False) for _ in range(blocks * matrices)]
    model = nn.Sequential(*[nn.Sequential(*layers[i::blocks]) for i in range(blocks)])
    if shards is None:
        model.bfloat16()
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for module in (*model, model):
            fully_shard(module, mesh=shards, mp_policy=policy, reshard_after_forward=gathers)
        model.set_requires_gradient_sync(sums)  # type: ignore[operator]
        model.set_reshard_after_backward(gathers)  # type: ignore[operator]
    operations = Operations()
    for mode in (nullcontext(), operations):
        with mode:
            model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    return operations.count
