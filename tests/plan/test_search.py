"""Which plan wins, what is said of those that do not, and that the answer can be carried out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from muster.errors import RecipeError
from muster.parallel.layout import Layout, layout_for
from muster.planner import report
from muster.planner import search as searching
from muster.planner.find_recipe import find_recipe
from muster.planner.memory import GIB, MARGIN
from muster.planner.search import CHECKPOINTING_MODES, TIE, _Search, rank, search
from muster.planner.time import Cluster
from muster.recipe.batch import solve
from plan import subjects
from plan.subjects import GPT, LLAMA, planner, subject


def least(thing, gpus: int, layout: Layout) -> float:
    """GiB without which the layout does not fit."""
    plans = planner(thing, gpus)
    estimates = [
        plans.evaluate(c).memory.total for c in _Search(plans, False)._choices(layout, False)
    ]
    return min(estimates) / GIB / (1 - MARGIN)


@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_model_that_fits_is_replicated(thorough):
    found = search(planner(subject(*GPT), 8), thorough=thorough)
    assert found.best is not None
    assert found.best.strategy == "ddp"
    assert found.best.choice.checkpointing == "none"


def test_one_device_needs_no_strategy():
    found = search(planner(subject(*GPT), 1))
    assert found.best is not None
    assert found.best.strategy == "single"
    assert report.settings(found.best)[0].startswith("training.per_device_batch_size=")


def test_a_smaller_device_takes_smaller_micro_batches():
    thing = subject(*GPT)
    large = search(planner(thing), thorough=False).best
    assert large is not None
    assert (large.choice.rows, large.choice.accumulation) == (64, 1)
    gib = large.memory.total / GIB  # without the margin
    small = search(planner(thing, gib=gib), thorough=False).best
    assert small is not None
    assert small.choice.rows < 64 <= small.choice.rows * small.choice.accumulation
    assert small.memory.total <= (1 - MARGIN) * gib * GIB


def test_a_copy_that_does_not_fit_is_sharded():
    thing = subject(*GPT)
    ddp, fsdp = (least(thing, 8, Layout(**{axis: 8})) for axis in ("replicate", "shard"))
    assert fsdp < ddp
    found = search(planner(thing, 8, gib=(ddp + fsdp) / 2), thorough=False)
    assert found.best is not None
    assert found.best.strategy in ("fsdp", "zero2", "zero3")
    assert "needs" in found.rejected["ddp"]


@pytest.mark.full
@pytest.mark.parametrize("gpus", [1, 8])
def test_what_is_not_evaluated_would_not_have_won(gpus, monkeypatch):
    """From devices that hold one sample with full checkpointing to those that hold everything. Their host is
    so fast that each of the three ways of checkpointing wins somewhere."""
    thing, planner = subject(*GPT), partial(subjects.planner, launch_us=0.1)
    nothing = search(planner(thing, gpus, gib=0.5))
    assert nothing.closest
    lowest = 1.001 * nothing.closest.memory.total / GIB / (1 - MARGIN)
    plans = [
        planner(thing, gpus, gib=lowest * (1 + part / 100)) for part in (0, 2, 4, 8, 16, 32, 64)
    ]
    quick = [search(each) for each in plans]
    monkeypatch.setattr(_Search, "_least_time", lambda *_: 0.0)
    monkeypatch.setattr(_Search, "_possible_saving", lambda *_: None)
    monkeypatch.setattr(searching, "_fits_without", lambda *_: False)
    whole = [search(each) for each in plans]
    for found, expected in zip(quick, whole, strict=True):
        assert found.best == expected.best
        strategies = [{plan.strategy for plan in one.plans} for one in (found, expected)]
        assert gpus > 1 or strategies[0] == strategies[1]
    assert len({found.best and found.best.choice.checkpointing for found in quick}) > 2
    monkeypatch.undo()
    for nodes in (plans[0], planner(thing, 2 * gpus, per_node=1, network=0.1)):
        bound = _Search(nodes, True)
        for layout in (Layout(replicate=nodes.cluster.world), Layout(shard=nodes.cluster.world)):
            for choice in bound._choices(layout, False):
                assert bound._least_time(choice) <= nodes.evaluate(choice).duration.total
    assert sum(len(found.plans) for found in quick) < sum(len(found.plans) for found in whole)


def test_what_fits_is_not_planned_with_checkpointing(monkeypatch):
    monkeypatch.setattr(_Search, "_least_time", lambda *_: 0.0)
    choices = {plan.choice for plan in search(planner(subject(*GPT))).plans}
    assert {choice.checkpointing for choice in choices} == {"none"}


def test_ties_go_to_the_simpler():
    plans = planner(subject(*GPT), 8)
    simple, other = (
        plans.evaluate(next(_Search(plans, False)._choices(layout, False)))
        for layout in (Layout(replicate=8), Layout(shard=8))
    )
    slower = replace(
        simple, duration=replace(other.duration, host=other.duration.host * (1 + TIE / 2))
    )
    assert rank([other, slower])[0] is slower
    clearly = replace(simple, duration=replace(other.duration, matrices=2 * other.duration.total))
    assert rank([clearly, other])[0] is other


@pytest.mark.full
@pytest.mark.parametrize("thorough", [False, True])
def test_nothing_fits_and_it_is_said_what_would_help(thorough):
    thing = subject(*LLAMA)
    plans = planner(thing, 2, gib=1.0)
    found = search(plans, thorough=thorough)
    assert found.best is None
    assert found.closest is not None
    words = "; ".join(report.remedies(plans, found))
    assert "data.sequence_length" in words
    assert "needs" in words


def test_tensor_ranks_stay_within_a_machine():
    thing = subject(*LLAMA)
    looked = _Search(planner(thing, 16, per_node=2), True)
    layouts = list(looked._split_layouts())
    assert max(layout.tensor for layout in layouts) == 2
    assert "spans nodes of 2" in looked.rejected["tensor 4"]


def test_context_ranks_are_in_every_layout_where_they_are_asked_for():
    looked = _Search(planner(subject(*LLAMA, "distributed.context=2"), 8, per_node=4), True)
    whole, split = list(looked._layouts()), list(looked._split_layouts())
    assert whole == [
        Layout(replicate=4, context=2, ddp=True),
        Layout(shard=4, context=2),
        Layout(replicate=2, shard=2, context=2),
    ]
    assert split == [Layout(shard=2, tensor=2, context=2)]
    assert "context" in looked.rejected["zero1, zero2, zero3"]


def test_context_ranks_are_refused_for_a_model_without_a_plan_for_them():
    thing = subject("speech", "distributed.context=2")
    with pytest.raises(RecipeError, match=r"distributed\.context.*no context-parallel plan"):
        search(planner(thing, 4), thorough=False)


def test_what_a_model_cannot_be_cut_into_is_said_once():
    looked = _Search(planner(subject(*LLAMA), 8), True)
    layouts = list(looked._split_layouts())
    assert {layout.tensor for layout in layouts} == {1, 2}  # two key-value heads
    assert "key-value heads" in looked.rejected["tensor"]
    assert "4 layers" in looked.rejected["pipeline"]


def test_adapters_are_only_sharded_or_replicated():
    thing = subject(*LLAMA, "model.lora.rank=4")
    found = search(planner(thing, 8), thorough=False)
    assert found.best is not None
    assert {plan.strategy for plan in found.plans} <= {"ddp", "fsdp", "hsdp"}
    assert "adapters" in found.rejected["zero1, zero2, zero3"]


def test_a_strategy_that_is_asked_for_is_the_only_one_weighed():
    thing = subject(*LLAMA, "distributed.strategy=fsdp")
    found = search(planner(thing, 4), thorough=False)
    assert {plan.strategy for plan in found.plans} == {"fsdp"}


@pytest.mark.guides
@pytest.mark.parametrize(
    "layout",
    [
        Layout(shard=8),
        pytest.param(Layout(replicate=8), marks=pytest.mark.full),
        pytest.param(Layout(replicate=2, shard=4), marks=pytest.mark.full),
        pytest.param(Layout(shard=8, zero=3), marks=pytest.mark.full),
        pytest.param(Layout(tensor=2, shard=4), marks=pytest.mark.full),
        pytest.param(Layout(pipeline=4, shard=2), marks=pytest.mark.full),
        pytest.param(Layout(pipeline=2, tensor=2, shard=2), marks=pytest.mark.full),
        pytest.param(Layout(replicate=2, shard=2, context=2), marks=pytest.mark.full),
        pytest.param(Layout(replicate=4, context=2, ddp=True), marks=pytest.mark.full),
        pytest.param(Layout(context=8), marks=pytest.mark.full),
        pytest.param(Layout(tensor=2, context=4), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_settings_make_train_do_as_planned(layout):
    thing = subject(*LLAMA)
    plans = planner(thing, 8)
    choices = list(_Search(plans, True)._choices(layout, False))
    by_mode = [[c for c in choices if c.checkpointing == mode] for mode in CHECKPOINTING_MODES]
    for choice in (choice for some in by_mode for choice in some[:4]):
        plan = plans.evaluate(choice)
        again = find_recipe(LLAMA[0], [*LLAMA[1:], *report.settings(plan)])
        assert layout_for(again.distributed, 8) == layout
        sizes = solve(again.training, layout.data_ranks)
        assert sizes.accumulation == choice.accumulation
        assert sizes.per_device <= choice.rows * choice.microbatches
        assert again.training.activation_checkpointing == choice.checkpointing


def test_the_answer_is_told_as_the_guides_tree():
    plans = planner(subject(*GPT), 8)
    lines = report.decision_tree(plans, search(plans, thorough=False))
    assert lines[0].startswith("Does one copy fit on one NVIDIA H100")
    assert "DDP, the simplest" in lines[1]
    assert lines[-2].startswith("Chosen: replicate 8") or lines[-1].startswith(
        "Chosen: replicate 8"
    )


@pytest.mark.parametrize(
    ("percent", "words"),
    [
        (3.2, "3 % slower."),
        (0.4, "as fast, but less simple."),
        (-0.4, "as fast, but less simple."),
        (-6, "6 % faster by the estimate, but less simple."),
    ],
)
def test_the_next_best_plan_is_compared_in_words(percent, words):
    assert report.compared(percent) == words


def test_a_gpu_without_bf16_is_told_that_fp16_is_faster():
    plans = planner(subject(*GPT), 1)
    found = search(plans, thorough=False)
    assert not any("precision" in line for line in report.decision_tree(plans, found))
    old = replace(plans.cluster.device, matrix_tflops={"fp16": 125.0, "fp32": 15.7})
    lines = report.decision_tree(plans.on(Cluster(old, 1, 8)), found)
    assert any("training.precision=fp16, with a loss scale, is faster" in line for line in lines)


def test_a_copy_whose_weights_alone_do_not_fit_is_not_recorded():
    plans = planner(subject(*GPT), 8)
    small = planner(subject(*GPT), 8, gib=0.001)
    lines = report.decision_tree(small, search(plans, thorough=False))
    assert lines[0].endswith("of 0.0 GiB for weights, gradients and the optimizer alone.")
    assert " No. " in lines[0]


@pytest.mark.parametrize(
    ("key", "only"),
    [
        ("distributed.ddp.static_graph=true", {("none", 1), ("selective", 1), ("full", 1)}),
        ("training.cuda_graphs=true", {("none", n) for n in (1, 2, 4)}),
    ],
)
def test_a_conflict_of_one_choice_leaves_the_others(key, only):
    """Static graphs exclude accumulation, CUDA graphs exclude checkpointing."""
    thing = subject(*GPT, key)
    gpus = 1 if "cuda" in key else 2
    layout = Layout(replicate=gpus)
    allowed = _Search(planner(thing, gpus), True)._allowed(layout, False)
    found = {(choice.checkpointing, choice.accumulation) for choice in allowed}
    assert only <= found
    assert {mode for mode, _ in found} == {mode for mode, _ in only}
    assert "cuda" in key or {count for _, count in found} == {1}


def test_batch_sizes_that_no_layout_can_have_are_not_called_too_large():
    sizes = ("training.per_device_batch_size=5", "training.gradient_accumulation_steps=4")
    with pytest.raises(RecipeError, match=r"64 is not per_device_batch_size 5 × .* 4"):
        search(planner(subject(*GPT, *sizes), 8))


def test_the_arithmetic_names_every_part():
    plans = planner(subject(*GPT), 4)
    best = search(plans, thorough=False).best
    assert best is not None
    text = "\n".join(report.arithmetic(plans, best))
    for word in ("weights", "gradients", "state", "activations", "buffers", "slack", "context"):
        assert word in text
    assert "global batch" in text
