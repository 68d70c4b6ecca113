"""What is expected of a run, and on a GPU whether it was reached."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from muster.hardware import catalogue, rehearsal
from muster.parallel.layout import Layout
from muster.planner.search import search
from muster.planner.strategy import propose
from muster.planner.time import Cluster
from plan.subjects import GPT, LLAMA, planner, subject

H100 = catalogue.find("h100")


def test_a_proposal_fills_in_what_the_recipe_leaves_open():
    decision = propose(subject(*GPT), Cluster(H100, 4, 4), "bf16")
    assert decision.layout == Layout(replicate=4)
    assert (decision.sizes.per_device, decision.sizes.accumulation) == (16, 1)
    assert decision.expected["memory_gib"] > 0
    assert decision.expected["step_time_s"] > 0
    assert sum(decision.expected["step_parts_s"].values()) == pytest.approx(
        decision.expected["step_time_s"]
    )


def test_a_proposal_keeps_what_the_recipe_says():
    thing = subject(*LLAMA, "distributed.strategy=hsdp", "training.per_device_batch_size=2")
    decision = propose(thing, Cluster(H100, 4, 4), "bf16")
    assert decision.layout == Layout(replicate=2, shard=2)
    assert (decision.sizes.per_device, decision.sizes.accumulation) == (2, 8)


def test_a_pipeline_of_the_recipes_own_is_promised_too():
    decision = propose(
        subject(*LLAMA, "distributed.strategy=pipeline"), Cluster(H100, 2, 2), "bf16"
    )
    assert decision.layout == Layout(pipeline=2)
    assert decision.expected["step_parts_s"]["bubble"] > 0


def propose_on_rank_0(mesh) -> dict[str, float]:
    thing = subject(*GPT, "distributed.strategy=tensor")
    found = propose(thing, Cluster(H100, 2, 2), "bf16").expected if mesh.first else {}
    assert mesh.sum(1.0)[0] == 2  # the run's own group is as before
    return found


@pytest.mark.full
def test_a_tensor_layout_is_promised_inside_a_run_as_before_it(ranks):
    inside = ranks(2)(propose_on_rank_0)[0]
    before = propose(subject(*GPT, "distributed.strategy=tensor"), Cluster(H100, 2, 2), "bf16")
    assert inside["memory_gib"] == before.expected["memory_gib"] > 0


def test_what_does_not_fit_is_tried_all_the_same_and_said(caplog):
    """The planner may be wrong; running out of memory says so more surely than it can."""
    from dataclasses import replace

    small = replace(H100, memory_gib=0.9)
    decision = propose(subject(*GPT), Cluster(small, 2, 2), "bf16")
    assert decision.layout.world == 2
    assert "does not fit" in caplog.text


def test_a_smaller_device_is_given_less_at_a_time():
    thing = subject(*GPT)
    whole = search(planner(thing), thorough=False).best
    assert whole is not None
    from dataclasses import replace

    tight = replace(H100, memory_gib=whole.memory.total / 2**30)
    decision = propose(thing, Cluster(tight, 1, 1), "bf16")
    assert decision.sizes.accumulation > 1
    assert decision.sizes.per_device * decision.sizes.accumulation >= 64


@pytest.mark.gpu
@pytest.mark.serial
@pytest.mark.parametrize("compile", ["true", "false"])
def test_a_run_takes_what_was_planned(tmp_path, compile):
    words = "training.steps=12 training.global_batch_size=64 evaluation.every_steps=null"
    words += f" evaluation.final=false logging.dir={tmp_path} training.compile={compile}"
    subprocess.run(
        [sys.executable, "-m", "muster", "train", "gpt2", "--run", "held", *words.split()],
        check=True,
        timeout=280,
        env={**os.environ, rehearsal.VARIABLE: "0"},  # a rehearsal compares no times
    )
    results = json.loads((tmp_path / "held" / "training_results.json").read_text())
    planned, measured = results["planned"], results["measured"]
    assert measured["memory_gib"] == pytest.approx(planned["memory_gib"], rel=0.08)
    assert measured["median_step_time_s"] == pytest.approx(planned["step_time_s"], rel=0.25)
