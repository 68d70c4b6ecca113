"""`strategy: auto` takes a copy per device while that fits, and all ranks agree."""

from __future__ import annotations

from dataclasses import replace

import psutil
import pytest
import torch

from muster.parallel.layout import Layout
from muster.parallel.mesh import Mesh
from muster.planner import strategy
from muster.planner.strategy import decide, device_bytes, parameter_count
from parallel.models import GPT, Maker, make_recipe

PARAMETERS = sum(p.numel() for p in Maker(GPT).build_model().parameters())
NEEDED = PARAMETERS * 16 / 0.6  # weight, gradient and two averages in 60 % of the memory


def choose(mesh, distributed, sizes: list[float]) -> Layout:
    """Rank i has `sizes[i]` bytes."""
    real = strategy.device_bytes
    strategy.device_bytes = lambda mesh: int(sizes[mesh.rank])
    try:
        return decide(make_recipe(distributed), Maker(GPT), None, mesh, "fp32").layout
    finally:
        strategy.device_bytes = real


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        ([NEEDED + 1, NEEDED + 1], Layout(replicate=2)),
        ([NEEDED - 1, NEEDED - 1], Layout(shard=2)),
        ([NEEDED * 9, NEEDED - 1], Layout(shard=2)),
        ([NEEDED - 1, NEEDED * 9], Layout(shard=2)),
    ],
    ids=["fits", "does not fit", "not on rank 1", "not on rank 0"],
)
def test_a_copy_must_fit_on_the_smallest_device(ranks, sizes, layout):
    assert ranks(2)(choose, {}, sizes) == [layout] * 2


def test_the_recipes_own_choice_is_not_questioned(ranks):
    assert ranks(2)(choose, {"strategy": "ddp"}, [1, 1]) == [Layout(replicate=2)] * 2
    assert ranks(2)(choose, {"strategy": "zero2"}, [1, 1]) == [Layout(shard=2, zero=2)] * 2


def planned_cluster(mesh, local_world: int) -> list[tuple[int, int]]:
    """World size and GPUs per node that rank 0 plans with, on nodes of eight GPUs."""
    asked = []

    def propose(subject, cluster, precision):
        asked.append((cluster.world, cluster.per_node))
        return strategy.Decision(Layout(replicate=2), None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 8)
        patch.setattr(strategy, "device_bytes", lambda mesh: 1)
        patch.setattr(strategy, "_accelerator", lambda device, smallest: None)
        patch.setattr(strategy, "propose", propose)
        on_gpus = replace(mesh, device=torch.device("cuda", 0), local_world=local_world)
        decide(make_recipe({}), Maker(GPT), None, on_gpus, "fp32")
    return asked


@pytest.mark.parametrize("local_world", [1, 2])
def test_the_planner_counts_ranks_on_a_node_not_its_gpus(ranks, local_world):
    assert ranks(2)(planned_cluster, local_world)[0] == [(2, local_world)]


def test_one_process_needs_no_others():
    alone = Mesh(0, 0, Layout(), torch.device("cpu"), None)
    assert choose(alone, {}, [1]).world == 1
    assert parameter_count(Maker(GPT)) == PARAMETERS


def test_ranks_on_a_cpu_share_its_memory():
    for world in (1, 4):
        mesh = Mesh(0, 0, Layout(replicate=8), torch.device("cpu"), None, local_world=world)
        assert device_bytes(mesh) == psutil.virtual_memory().total // world
