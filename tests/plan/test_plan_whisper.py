"""Plans for Whisper in pipeline stages, whose layers are of two kinds."""

from __future__ import annotations

import dataclasses

import pytest

from muster.errors import MusterError, RecipeError
from muster.parallel.layout import Layout
from muster.planner.memory import Choice
from muster.planner.search import _Search
from muster.planner.shards import stages
from muster.planner.simulate import simulate
from plan.subjects import planner, subject

WHISPER = (
    "whisper-micro",
    "data.window=3",
    "training.global_batch_size=16",
    "training.compile=false",
)
TIED = "model.decoder.embed_tokens.weight"


def test_stages_hold_the_layers_of_the_whole_and_its_tied_embedding_twice():
    thing = subject(*WHISPER)
    (whole,) = stages(thing, Layout())
    held = stages(thing, Layout(pipeline=4))
    for stack, depth in whole.depths.items():
        assert sum(stage.depths.get(stack, 0) for stage in held) == depth
    (tied,) = (p.numel for p in whole.parameters if p.name == TIED)
    assert sum(stage.numel for stage in held) == whole.numel + tied
    assert held[-1].depths["model.encoder.layers"] == 0


def test_a_stage_of_the_encoder_costs_nothing_of_the_decoder():
    found = planner(subject(*WHISPER), 4)
    first, *_, last = found.stages(Layout(pipeline=4))
    mode = found._mode(Choice(Layout(pipeline=4), "bf16", rows=2))
    for stage, absent in ((first, "model.decoder.layers"), (last, "model.encoder.layers")):
        workload = found._workload(mode, stage, 2, costliest=True)
        inside = {point.region for _, point, _ in workload.ops if point.position.startswith("in ")}
        assert inside
        assert absent not in inside
    choice = Choice(Layout(pipeline=4), "bf16", rows=2, microbatches=8)
    plan = found.evaluate(choice)
    alone = found.evaluate(dataclasses.replace(choice, layout=Layout(), microbatches=1))
    assert 0 < plan.memory.parts["weights"] < alone.memory.parts["weights"]
    assert 0 < plan.duration.matrices < 8 * alone.duration.matrices


def test_what_training_would_refuse_the_planner_refuses():
    pipeline = ("distributed.strategy=pipeline",)
    schedule = "distributed.pipeline_options.schedule=zero-bubble"
    with pytest.raises(RecipeError, match="zero-bubble"):
        list(_Search(planner(subject(*WHISPER, *pipeline, schedule), 2), True)._layouts())


def test_a_fake_cluster_has_no_stages_of_an_encoder_and_a_decoder():
    thing = subject(*WHISPER)
    with pytest.raises(MusterError, match=r"distributed\.pipeline=1"):
        simulate(thing, Layout(pipeline=2), recipe=thing.recipe, precision="fp32", rank=0, rows=2)
