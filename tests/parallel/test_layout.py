"""Sizes are checked once, before anything is built, with the number to change."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from muster import models
from muster.errors import RecipeError
from muster.models.decoder import Decoder
from muster.models.plan import ParallelPlan
from muster.parallel.layout import PRESETS, Layout, layout_for, strategy_name, unused_keys
from muster.parallel.mesh import Mesh
from muster.recipe.distributed import DeepSpeed, Distributed
from muster.recipe.load import load
from parallel.models import LLAMA


def plan_of(config) -> ParallelPlan:
    with torch.device("meta"):
        return Decoder(config).plan


@pytest.mark.parametrize(
    ("options", "world", "layout", "name"),
    [
        ({"strategy": "ddp"}, 4, Layout(replicate=4), "ddp"),
        ({"strategy": "ddp"}, 1, Layout(), "single"),
        ({"strategy": "auto"}, 4, Layout(replicate=4), "ddp"),
        ({"strategy": "fsdp"}, 3, Layout(shard=3), "fsdp"),
        ({"strategy": "hsdp"}, 6, Layout(replicate=2, shard=3), "hsdp"),
        ({"strategy": "hsdp", "replicate": 3}, 6, Layout(replicate=3, shard=2), "hsdp"),
        ({"strategy": "hsdp", "shard": 4}, 8, Layout(replicate=2, shard=4), "hsdp"),
        (
            {"strategy": "hsdp", "shard": 4, "replicate": 2},
            8,
            Layout(replicate=2, shard=4),
            "hsdp",
        ),
        ({"strategy": "zero1"}, 4, Layout(shard=4, zero=1), "zero1"),
        ({"strategy": "zero2"}, 4, Layout(shard=4, zero=2), "zero2"),
        ({"strategy": "zero3"}, 4, Layout(shard=4, zero=3), "zero3"),
        ({"strategy": "tensor"}, 4, Layout(tensor=4), "tensor"),
        ({"strategy": "tensor", "tensor": 2}, 4, Layout(tensor=2, replicate=2), "hybrid"),
        ({"strategy": "pipeline"}, 4, Layout(pipeline=4), "pipeline"),
        ({"strategy": "pipeline", "pipeline": 2}, 4, Layout(pipeline=2, replicate=2), "hybrid"),
        ({"strategy": "hybrid", "tensor": 2}, 8, Layout(tensor=2, shard=4), "hybrid"),
        (
            {"strategy": "hybrid", "tensor": 2, "pipeline": 2, "replicate": 2, "shard": 2},
            16,
            Layout(2, 2, 2, 2),
            "hybrid",
        ),
        ({"strategy": "hybrid", "shard": 4}, 4, Layout(shard=4), "fsdp"),
        ({"strategy": "context"}, 4, Layout(context=4), "context"),
        ({"strategy": "context", "context": 2}, 4, Layout(replicate=2, context=2), "hsdp"),
        ({"strategy": "context"}, 1, Layout(), "single"),
        (
            {"strategy": "ddp", "context": 2},
            4,
            Layout(replicate=2, context=2, ddp=True),
            "ddp",
        ),
        ({"strategy": "auto", "context": 2}, 2, Layout(context=2, ddp=True), "ddp"),
        ({"strategy": "fsdp", "context": 2}, 8, Layout(shard=4, context=2), "fsdp"),
        ({"strategy": "fsdp", "context": 2}, 2, Layout(context=2), "context"),
        ({"strategy": "hsdp", "context": 2}, 8, Layout(2, 2, context=2), "hsdp"),
        ({"strategy": "hybrid", "context": 2}, 4, Layout(shard=2, context=2), "fsdp"),
        (
            {"strategy": "hybrid", "context": 2, "tensor": 2},
            8,
            Layout(shard=2, tensor=2, context=2),
            "hybrid",
        ),
    ],
)
def test_a_strategy_is_a_preset_of_sizes(options, world, layout, name):
    found = layout_for(Distributed(**options), world)
    assert found == layout
    assert found.world == world
    assert strategy_name(found) == name


@pytest.mark.parametrize(
    ("world", "local_world", "layout"),
    [
        (32, 8, Layout(replicate=4, shard=8)),
        (8, 4, Layout(replicate=2, shard=4)),
        (8, 8, Layout(replicate=2, shard=4)),  # one machine: one copy would be fsdp
        (4, 1, Layout(replicate=2, shard=2)),  # one rank on each: a copy on each would be ddp
    ],
)
def test_hsdp_makes_one_copy_on_each_machine(world, local_world, layout):
    assert layout_for(Distributed(strategy="hsdp"), world, local_world=local_world) == layout


def test_hsdp_on_unequal_machines_names_the_key_to_set():
    with pytest.raises(RecipeError, match=r"one copy on each machine.*set distributed\.replicate"):
        layout_for(Distributed(strategy="hsdp"), 6, local_world=4)
    options = Distributed(strategy="hsdp", replicate=2)
    assert layout_for(options, 6, local_world=4) == Layout(replicate=2, shard=3)


@pytest.mark.parametrize(
    ("options", "world", "words"),
    [
        (
            {"strategy": "hsdp"},
            5,
            r"distributed\.replicate: 2 does not divide the 5 ranks; use 1, or start 4 ranks",
        ),
        (
            {"strategy": "hsdp", "shard": 3},
            4,
            r"distributed\.shard: 3 does not divide the 4 ranks; use 2, or start 3 ranks",
        ),
        (
            {"strategy": "hsdp", "shard": 2, "replicate": 2},
            8,
            "replicate 2 × shard 2 makes 4 ranks, but 8 were started",
        ),
        ({"strategy": "tensor", "tensor": 4}, 2, r"distributed\.tensor: 4 does not divide"),
        ({"strategy": "pipeline", "pipeline": 3}, 4, r"distributed\.pipeline: 3 does not divide"),
        (
            {"strategy": "hybrid"},
            4,
            r"hybrid needs sizes; set for instance distributed\.tensor=2",
        ),
        ({"strategy": "hybrid", "tensor": 2, "pipeline": 2}, 6, "4 does not divide the 6 ranks"),
        (
            {"strategy": "hybrid", "tensor": 2, "shard": 2},
            8,
            "shard 2 × tensor 2 makes 4 ranks, but 8 were started; change the sizes or --gpus",
        ),
        (
            {"strategy": "ddp", "replicate": 4},
            4,
            r"distributed\.replicate is set, but strategy ddp",
        ),
        ({"strategy": "fsdp", "shard": 2}, 4, r"distributed\.shard is set, but strategy fsdp"),
        ({"strategy": "hsdp", "tensor": 2}, 4, r"distributed\.tensor is set, but strategy hsdp"),
        ({"strategy": "tensor", "shard": 2}, 4, r"distributed\.shard is set, but strategy tensor"),
        ({"strategy": "zero3", "tensor": 2}, 4, r"distributed\.tensor is set, but strategy zero3"),
        (
            {"strategy": "context", "tensor": 2},
            4,
            r"distributed\.tensor is set, but strategy context",
        ),
        (
            {"strategy": "zero2", "context": 2},
            4,
            r"distributed\.context is set, but strategy zero2.*use ddp, fsdp, hsdp or strategy=hybrid",
        ),
        (
            {"strategy": "hybrid", "context": 2, "pipeline": 2},
            4,
            r"distributed\.context: pipeline 2 × context 2 would send parts of sequences",
        ),
        (
            {"strategy": "ddp", "context": 3},
            4,
            r"distributed\.context: 3 does not divide the 4 ranks",
        ),
        (
            {"strategy": "auto", "pipeline": 2},
            4,
            r"distributed\.pipeline is set.*strategy=hybrid, or set distributed\.pipeline=auto",
        ),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(options, world, words):
    with pytest.raises(RecipeError, match=words):
        layout_for(Distributed(**options), world)


@pytest.mark.parametrize("axis", ["replicate", "tensor", "pipeline", "context"])
def test_zero_multiplies_with_nothing(axis):
    with pytest.raises(RecipeError, match=r"zero2 shards over all ranks.*strategy=hybrid"):
        Layout(shard=2, zero=2, **{axis: 2})


def test_no_size_is_below_one():
    with pytest.raises(RecipeError, match=r"distributed\.tensor: 0, but every size is at least 1"):
        Layout(tensor=0)


@pytest.mark.parametrize(
    ("layout", "stages", "words"),
    [
        (
            Layout(tensor=8),
            1,
            r"distributed\.tensor: 8 does not divide the 4 heads of model x; use 1 or 2$",
        ),
        (Layout(tensor=4), 1, r"4 does not divide the 2 key-value heads of model x; use 1 or 2$"),
        (Layout(pipeline=5), 1, "5 ranks × 1 stages each is 5 stages, but model x has 4 layers"),
        (
            Layout(pipeline=3),
            2,
            r"6 stages, but model x has 4 layers; use at most 2 pipeline ranks",
        ),
    ],
)
def test_a_model_refuses_what_it_cannot_be_cut_into(layout, stages, words):
    with pytest.raises(RecipeError, match=words):
        layout.check_model(plan_of(LLAMA), "model x", stages)


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(pipeline=4), Layout(2, 2, 2, 2)])
def test_a_model_takes_what_it_can_be_cut_into(layout):
    layout.check_model(plan_of(LLAMA), "model x")


@pytest.mark.parametrize("technique", ["tensor", "pipeline"])
@pytest.mark.parametrize("preset", ["lmu-micro", "resnet-18"])
def test_a_model_without_a_plan_says_what_it_trains_with(preset, technique):
    with torch.device("meta"):
        plan = models.build(preset).plan
    with pytest.raises(RecipeError) as caught:
        Layout(**{technique: 2}).check_model(plan, f"model {preset}")
    assert f"model {preset} has no {technique}-parallel plan" in str(caught.value)
    named = str(caught.value).split("trains with ")[1].split(", ")
    assert named == ["ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"]
    for strategy in named:
        layout_for(Distributed(strategy=strategy), 4).check_model(plan, preset)


SIZES = list(itertools.product((1, 2, 3), repeat=4))


def test_ranks_are_numbered_pipeline_outermost_tensor_innermost():
    for pipeline, replicate, shard, tensor in SIZES:
        layout = Layout(replicate, shard, tensor, pipeline)
        grid = np.arange(layout.world).reshape(pipeline, replicate * shard, tensor)
        for (p, d, t), rank in np.ndenumerate(grid):
            place = layout.pipeline_rank(rank), layout.data_rank(rank), layout.tensor_rank(rank)
            assert place == (p, d, t)


def test_exactly_one_rank_speaks_for_each_share_of_the_data():
    for pipeline, replicate, shard, tensor in SIZES:
        layout = Layout(replicate, shard, tensor, pipeline)
        assert layout.world == math.prod((pipeline, replicate, shard, tensor))
        ranks = [Mesh(r, r, layout, torch.device("cpu"), None) for r in range(layout.world)]
        speakers = [mesh for mesh in ranks if mesh.is_reporter]
        assert sorted(m.data_rank for m in speakers) == list(range(layout.data_ranks))
        assert {layout.pipeline_rank(m.rank) for m in speakers} == {pipeline - 1}


def sums(mesh, layout: Layout) -> list[float]:
    """Every rank says its data rank's number; those that share one say it once."""
    placed = mesh.with_layout(layout)
    return placed.sum(10.0**placed.data_rank, everyone=1.0)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(tensor=2), [1.0, 2.0]),
        (Layout(pipeline=2), [1.0, 2.0]),
        (Layout(shard=2), [11.0, 2.0]),
        (Layout(shard=2, zero=1), [11.0, 2.0]),
    ],
)
def test_a_sum_counts_each_share_of_the_data_once(ranks, layout, expected):
    assert ranks(2)(sums, layout) == [expected] * 2


def test_a_forward_pass_is_collective_where_parameters_are_gathered():
    assert Layout(shard=2).collective_forward
    assert Layout(replicate=2, shard=2).collective_forward
    assert Layout(shard=2, zero=3).collective_forward
    assert not Layout(shard=2, zero=2).collective_forward
    assert not Layout(replicate=2).collective_forward
    assert not Layout(tensor=2, pipeline=2).collective_forward


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "hybrid"])
def test_a_strategy_given_anew_forgets_the_sizes_of_the_one_before(name):
    before = ["tensor=2", "pipeline=2", "replicate=2"]
    before += [
        "deepspeed={config: ds.json, offload_optimizer: nvme, offload_param: cpu, nvme_path: n}"
    ]
    silent = [f"{key}={value}" for key, value in unused_keys(name).items()]
    shard = ["distributed.shard=auto"] if name == "hsdp" else []
    given = [f"distributed.{word}" for word in [*before, f"strategy={name}"]]
    options = load("gpt-micro", [*given, *silent, *shard]).distributed
    assert layout_for(options, 8).world == 8


def test_all_of_deepspeeds_options_are_forgotten():
    found = {key.rpartition(".")[2] for key in unused_keys("ddp") if "deepspeed" in key}
    assert found == set(DeepSpeed.model_fields)


@pytest.mark.parametrize(
    ("sizes", "length", "words"),
    [
        ({"context": 4}, 60, "60 is not a multiple of 8, which context 4 needs.*use 56 or 64"),
        ({"context": 4}, 4, "4 is not a multiple of 8.*use 8, or"),
        ({"context": 2, "tensor": 4}, 36, "36 is not a multiple of 8,.*use 32 or 40"),
        ({"context": 4, "ddp": True}, 60, r"60 is.*context 4 \(DDP\) needs.*use 56 or 64"),
    ],
)
def test_sequences_that_context_ranks_cannot_share_are_refused(sizes, length, words):
    recipe = load("llama-micro", [f"data.sequence_length={length}"])
    with pytest.raises(RecipeError, match=rf"data\.sequence_length: {words}"):
        Layout(**sizes).check_sequences(recipe)
    Layout(**sizes).check_sequences(load("llama-micro", ["data.sequence_length=64"]))


def test_only_what_has_tokens_and_a_plan_is_shared_by_context_ranks():
    with pytest.raises(
        RecipeError, match=r"distributed\.context: 2, but only causal-lm.*speech-ctc"
    ):
        Layout(context=2).check_sequences(load("speech", []))
    with pytest.raises(RecipeError, match=r"distributed\.context: m has no context-parallel plan"):
        Layout(context=2).check_model(ParallelPlan(blocks=("Block",)), "m")
    Layout(context=2).check_model(plan_of(LLAMA), "m")


def test_context_ranks_count_each_sample_and_each_shard_once():
    layout = Layout(replicate=2, shard=2, context=2, tensor=2)
    device = torch.device("cpu")
    meshes = [Mesh(rank, 0, layout, device, None) for rank in range(layout.world)]
    assert sorted(m.data_rank for m in meshes if m.is_reporter) == list(range(4))
    parts = [(m.data_rank, m.context_rank) for m in meshes if m.has_loss]
    assert sorted(parts) == list(itertools.product(range(4), range(2)))
    shards = {layout.shard_rank(rank) for rank in range(layout.world)}
    assert shards == set(range(layout.shards)) == set(range(4))
    assert Layout(replicate=2, context=2, ddp=True).shards == 1
