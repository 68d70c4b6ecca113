"""What each rank really holds, and how high its memory rises, against what the planner says."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from muster.checks.parity import ROWS, StrategyRow
from muster.data.loader import Batch, Inputs
from muster.hardware import catalogue
from muster.parallel.apply import apply
from muster.parallel.engine import StepFunctions
from muster.parallel.layout import Layout, layout_for
from muster.parallel.stages import stages_per_rank
from muster.planner import memory
from muster.planner.fake_cuda import autocast
from muster.planner.memory import Choice, MemoryEstimate, estimate_memory, static_memory
from muster.planner.open_subject import open_subject
from muster.planner.optimizer import OptimizerChoice
from muster.planner.planner import Planner, split_axes
from muster.planner.profile import ExecutionMode, ModelCost, record
from muster.planner.shards import Stage, stages
from muster.planner.simulate import simulate
from muster.planner.subject import Subject
from muster.planner.time import Cluster
from muster.recipe.load import load
from muster.recipe.schema import Recipe
from muster.training.optimizer import make_optimizer
from parallel.models import GPT, LLAMA, Maker, inputs_of, make_batch, make_recipe, summed_loss

# 67 hidden units, 37 symbols and 5 layers divide by neither 2 nor 4.
SMALL = {
    "gpt": dataclasses.replace(GPT, layers=5, hidden=67),
    "llama": dataclasses.replace(LLAMA, layers=5, hidden=67, kv_heads=4),
}
ROWS_EACH = 2  # samples per forward pass


@dataclass(frozen=True)
class Little(Maker):
    """As much of a task as a step needs. `frozen`: only queries and values learn, as with LoRA."""

    frozen: bool = False

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for name, p in model.named_parameters():
            p.requires_grad_(not self.frozen or ".q." in name or ".v." in name)
        return model

    def example(self) -> str:
        return "any"

    def collate(self, samples: Sequence[Any], epoch: int) -> Batch:
        return make_batch(self.config, len(samples))

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def inputs(self, batch: Batch) -> Inputs:
        return inputs_of(batch)

    def loss(self, output: Any, batch: Batch) -> Tensor:
        return summed_loss(output, batch)


def recipe_of(row: StrategyRow) -> Recipe:
    return load("gpt-micro", ["training.precision=fp32", *row.options])


def storages(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the memory behind some tensors, what they share counted once."""
    found: dict[int, int] = {}
    for t in tensors:
        if t is not None:
            storage = (t.to_local() if isinstance(t, DTensor) else t).untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def measured(mesh, task: Little, recipe: Recipe, precision: str) -> dict[str, int]:
    """After one step, and with the gradients of the next. AdamW's counts of steps are left out."""
    layout = layout_for(recipe.distributed, mesh.world)
    make = lambda named: make_optimizer(recipe.training, named)  # noqa: E731
    engine: Any = apply(task, mesh.with_layout(layout), recipe, precision, make)
    functions = StepFunctions(
        task.prepare, task.inputs, task.loss, lambda: autocast(precision), 1e-3
    )
    batches = [make_batch(task.config, ROWS_EACH)] * max(2, 2 * layout.pipeline)
    for last in (False, True):
        engine.accumulate(batches, functions)
        engine.grad_norm()  # torch leaves a cut embedding's gradient whole until here
        if not last:
            engine.step(1e-3)
            engine.zero_grad()
    parameters = [p for part in engine.parts for p in part.parameters()]
    held = {"weights": storages(parameters), "gradients": storages(p.grad for p in parameters)}
    inner = engine.optimizer
    if layout.zero:
        inner, zero = inner.optimizer, inner
        averaged = [g for group in zero.averaged_gradients.values() for g in group or ()]
        held["gradients"] = storages(averaged)
        masters = getattr(zero, "single_partition_of_fp32_groups", None)
        if layout.zero == 3:
            masters = zero.fp32_partitioned_groups_flat
            held["weights"] = storages(p.ds_tensor for p in parameters)
        held["master weights"] = storages(masters)
    moments = [t for s in inner.state.values() for name, t in s.items() if name != "step"]
    return held | {"optimizer": storages(moments)}


def stage_of(task: Little, recipe: Recipe, layout: Layout, rank: int) -> Stage:
    return stages(
        Subject(recipe, task),  # type: ignore[arg-type]
        layout,
        per_rank=stages_per_rank(recipe.distributed.pipeline_options),
        tensor_rank=layout.tensor_rank(rank),
    )[layout.pipeline_rank(rank)]


ORDINARY = {
    ("ddp", 2, "gpt", "bf16"),
    ("zero3", 2, "gpt", "bf16"),
    ("pipeline 1f1b", 4, "gpt", "fp32"),
    ("tensor", 2, "llama", "bf16"),
}


def cells():
    for row in ROWS:
        for world in row.worlds:
            for model in SMALL:
                for precision in ("fp32", "bf16"):
                    key = (row.name, world, model, precision)
                    marks = () if key in ORDINARY else (pytest.mark.full,)
                    yield pytest.param(row, *key[1:], marks=marks, id="-".join(map(str, key)))


def test_the_ordinary_rows_exist():
    assert {key[:2] for key in ORDINARY} <= {(r.name, world) for r in ROWS for world in r.worlds}


@pytest.mark.parametrize(("row", "world", "model", "precision"), list(cells()))
def test_every_rank_holds_the_bytes_that_were_planned(ranks, row, world, model, precision):
    if row.name.startswith("zero"):
        pytest.importorskip("deepspeed")
    recipe = recipe_of(row)
    layout = layout_for(recipe.distributed, world)
    config = SMALL[model]
    if "interleaved" in row.name:
        config = dataclasses.replace(config, layers=2 * world + 1)
    task = Little(config)
    choice = Choice(layout, precision, ROWS_EACH, accumulation=2)
    for rank, found in enumerate(ranks(world)(measured, task, recipe, precision)):
        planned = static_memory(choice, stage_of(task, recipe, layout, rank), rank)
        assert found == planned, f"rank {rank}"


# Matrices of more than 4,096 elements, which 8-bit averages take, on two ranks.
WIDE = dataclasses.replace(LLAMA, width=64, hidden=256)


@pytest.mark.parametrize(
    ("optimizer", "strategy"),
    [
        ("adafactor", "fsdp"),
        ("muon", "fsdp"),
        ("adamw-8bit", "fsdp"),
        *(
            pytest.param(o, s, marks=pytest.mark.full)
            for o, s in (
                ("sgd", "fsdp"),
                ("sgd", "zero2"),
                ("sgd", "zero3"),
                ("adafactor", "tensor"),
                ("muon", "tensor"),
                ("adamw-8bit", "ddp"),
            )
        ),
    ],
)
def test_every_optimizer_keeps_the_bytes_that_were_planned(ranks, optimizer, strategy):
    for module in ("torchao",) * (optimizer == "adamw-8bit") + ("deepspeed",) * (
        "zero" in strategy
    ):
        pytest.importorskip(module)
    recipe = make_recipe({"strategy": strategy}, optimizer=optimizer)
    layout = layout_for(recipe.distributed, 2)
    kept = OptimizerChoice.of(recipe.training)
    choice = Choice(layout, "fp32", ROWS_EACH, accumulation=2, optimizer=kept)
    task = Little(WIDE)
    for rank, found in enumerate(ranks(2)(measured, task, recipe, "fp32")):
        stage = stage_of(task, recipe, layout, rank)
        assert found == static_memory(choice, stage, rank), f"rank {rank}"
        if optimizer != "adamw":
            assert (
                found["optimizer"]
                < static_memory(replace_optimizer(choice), stage, rank)["optimizer"]
            )


def replace_optimizer(choice: Choice) -> Choice:
    return dataclasses.replace(choice, optimizer=OptimizerChoice())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_weights_that_rest_have_no_gradients(ranks, strategy):
    recipe = make_recipe({"strategy": strategy})
    layout = layout_for(recipe.distributed, 2)
    task = Little(SMALL["llama"], frozen=True)
    for rank, found in enumerate(ranks(2)(measured, task, recipe, "fp32")):
        stage = stage_of(task, recipe, layout, rank)
        assert found == static_memory(Choice(layout, "fp32", ROWS_EACH), stage, rank)
        assert found["gradients"] < 0.3 * found["weights"]


# Blocks that are much larger than what they compute on.
BIG = {
    "gpt": dataclasses.replace(GPT, vocab=300, layers=6, width=256, hidden=1024),
    "llama": dataclasses.replace(LLAMA, vocab=6000, layers=6, width=256, hidden=1024),
    "logits": dataclasses.replace(GPT, vocab=64 * 900, layers=3, width=8, hidden=16),
}


def choice_of(recipe: Recipe, world: int, precision: str, count: int = 1) -> Choice:
    options = recipe.distributed
    layout = layout_for(options, world)
    piped = layout.pipeline > 1
    return Choice(
        layout,
        precision,
        ROWS_EACH,
        accumulation=1 if piped else count,
        microbatches=count if piped else 1,
        reduce_each=options.fsdp.reduce_each_micro_batch,
        keep_gathered=options.fsdp.sharding == "shard_grad_op",
    )


@cache
def load_of(model: str, precision: str, rounded: bool, layers: int, context: int = 1) -> ModelCost:
    subject = Subject(make_recipe(), Little(BIG[model]))  # type: ignore[arg-type]
    mode = ExecutionMode(
        precision, rounded_weights=rounded and precision != "fp32", context=context
    )
    if context == 1:
        return record(subject, mode).workload({"blocks": layers}, ROWS_EACH)
    with split_axes(1, context) as axes:
        return record(subject, mode, axes=axes).workload({"blocks": layers}, ROWS_EACH)


def needed(model: str, recipe: Recipe, choice: Choice, rank: int = 0) -> MemoryEstimate:
    stage = stage_of(Little(BIG[model]), recipe, choice.layout, rank)
    rounded = choice.sharded or choice.layout.zero > 0
    return estimate_memory(
        choice,
        stage,
        load_of(model, choice.precision, rounded, stage.layers, choice.layout.context),
        rank,
    )


def fsdp(**options: Any) -> dict[str, Any]:
    return {"strategy": "fsdp", "fsdp": options}


PEAKS: dict[str, tuple[str, dict[str, Any], int, str, int]] = {
    "one rank": ("gpt", {"strategy": "ddp"}, 1, "fp32", 1),
    "ddp": ("gpt", {"strategy": "ddp"}, 2, "bf16", 1),
    "ddp accumulated": ("gpt", {"strategy": "ddp"}, 2, "bf16", 3),
    "fsdp": ("gpt", fsdp(), 8, "fp32", 1),
    "fsdp bf16": ("llama", fsdp(), 8, "bf16", 1),
    "fsdp on two": ("llama", fsdp(), 2, "fp32", 1),
    "whole gradients": ("gpt", fsdp(), 8, "fp32", 3),
    "whole gradients bf16": ("gpt", fsdp(), 8, "bf16", 3),
    "sums each": ("llama", fsdp(reduce_each_micro_batch=True), 8, "bf16", 3),
    "keeps": ("gpt", fsdp(sharding="shard_grad_op"), 8, "fp32", 1),
    "keeps bf16": ("llama", fsdp(sharding="shard_grad_op"), 8, "bf16", 1),
    "hsdp": ("llama", {"strategy": "hsdp"}, 8, "bf16", 1),
    "context": ("gpt", {"strategy": "context"}, 2, "bf16", 1),
    "context × fsdp": ("gpt", {"strategy": "fsdp", "context": 4}, 8, "fp32", 3),
    "pipeline": ("gpt", {"strategy": "pipeline"}, 2, "fp32", 4),
    "pipeline × fsdp": ("llama", {"strategy": "hybrid", "pipeline": 2}, 8, "fp32", 4),
    "pipeline × fsdp bf16": ("llama", {"strategy": "hybrid", "pipeline": 2}, 8, "bf16", 4),
}


ORDINARY_PEAKS = ("whole gradients bf16",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ORDINARY_PEAKS else pytest.mark.full) for n in PEAKS],
)
def test_memory_rises_as_high_as_was_planned(name):
    """Against the step itself on a fake cluster. Left out of a plan, any term of a block's size shows."""
    model, distributed, world, precision, count = PEAKS[name]
    recipe = make_recipe(distributed)
    choice = choice_of(recipe, world, precision, count)
    real = simulate(
        Subject(recipe, Little(BIG[model])),  # type: ignore[arg-type]
        choice.layout,
        recipe=recipe,
        precision=precision,
        rank=0,
        rows=ROWS_EACH,
        accumulation=count,
    )
    planned = needed(model, recipe, choice).allocated - memory.WORKSPACE
    assert planned == pytest.approx(real.peak, rel=0.03)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("llama-micro", {"context": 2}, marks=pytest.mark.full),
        pytest.param("gpt-micro", {"context": 4}, marks=pytest.mark.full),
        pytest.param("llama-micro", {"context": 2, "tensor": 2}, marks=pytest.mark.full),
    ],
)
def test_activations_of_long_sequences_are_those_of_one_context_rank(name, sizes):
    """Against the step on a fake cluster; nearly all of it is activations."""
    layout = Layout(**sizes)
    settings = ["data.sequence_length=256", "training.compile=false", "training.precision=bf16"]
    subject = open_subject(load(name, settings))
    plan = Planner(subject, Cluster(catalogue.find("h100"), layout.world, 8), "bf16").evaluate(
        Choice(layout, "bf16", rows=16)
    )
    real = simulate(subject, layout, recipe=subject.recipe, precision="bf16", rank=0, rows=16)
    planned = plan.memory.allocated - memory.WORKSPACE
    assert plan.memory.parts["activations"] > 0.8 * planned
    assert planned == pytest.approx(real.peak, rel=0.03)
    assert plan.duration.context > 0
    assert (plan.duration.tensor > 0) == (layout.tensor > 1)


def highest(mesh, model: str, recipe: Recipe, precision: str, count: int) -> int:
    """What a recorder sees of DeepSpeed, whose steps only real processes can run."""
    from muster.planner.dtensor_recorder import DTensorRecorder
    from muster.planner.trace import Trace

    task = Little(BIG[model])
    layout = layout_for(recipe.distributed, mesh.world)
    make = lambda named: make_optimizer(recipe.training, named)  # noqa: E731
    engine: Any = apply(task, mesh.with_layout(layout), recipe, precision, make)
    functions = StepFunctions(
        task.prepare, task.inputs, task.loss, lambda: autocast(precision), 1e-3
    )
    recorder = DTensorRecorder()
    for p in engine.parts[0].parameters():
        recorder.track(getattr(p, "ds_tensor", p), "weights")
    for _ in range(2):
        gc.collect()  # DeepSpeed leaves cycles
        recorder.trace = Trace()
        with recorder:
            engine.accumulate([make_batch(task.config, ROWS_EACH)] * count, functions)
            engine.grad_norm()
            engine.step(1e-3)
        engine.zero_grad()
    return recorder.trace.peak


@pytest.mark.parametrize(
    ("model", "stage", "count", "elements"),
    [
        pytest.param("gpt", 1, 1, None, marks=pytest.mark.full),
        pytest.param("gpt", 1, 2, None, marks=pytest.mark.full),
        pytest.param("logits", 1, 2, None, marks=pytest.mark.full),
        pytest.param("gpt", 2, 1, None, marks=pytest.mark.full),
        pytest.param("gpt", 2, 2, None, marks=pytest.mark.full),
        pytest.param("gpt", 3, 1, None, marks=pytest.mark.full),
        pytest.param("llama", 1, 1, None, marks=pytest.mark.full),
        pytest.param("llama", 2, 1, None, marks=pytest.mark.full),
        pytest.param("logits", 1, 1, None, marks=pytest.mark.full),
        ("logits", 2, 1, None),
        ("logits", 2, 1, 1_000_000),  # more than the model: nothing is reduced before the end
        pytest.param("llama", 1, 1, 3_000_000, marks=pytest.mark.full),
        pytest.param("llama", 1, 2, 3_000_000, marks=pytest.mark.full),
        pytest.param("llama", 2, 1, 3_000_000, marks=pytest.mark.full),
        # The bucket is reduced several times.
        pytest.param("llama", 2, 2, 3_000_000, marks=pytest.mark.full),
    ],
)
def test_deepspeed_rises_as_high_as_was_planned(
    ranks, tmp_path, monkeypatch, model, stage, count, elements
):
    """Beside the bucket of DeepSpeed's usual size, which is larger than all the rest of so small a model;
    it comes after the logits are gone. A smaller bucket does not matter beside them."""
    pytest.importorskip("deepspeed")
    options: dict[str, Any] = {"strategy": f"zero{stage}"}
    if elements:
        monkeypatch.setattr(memory, "ZERO_BUCKET", elements)
        path = tmp_path / "deepspeed.json"
        path.write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": elements}}))
        options["deepspeed"] = {"config": str(path)}
    recipe = make_recipe(options)
    choice = choice_of(recipe, 2, "fp32", count)
    bucket = 0 if elements else choice.low * memory.ZERO_BUCKET
    planned = needed(model, recipe, choice).allocated - memory.WORKSPACE - bucket
    real = max(ranks(2)(highest, model, recipe, "fp32", count)) - bucket
    assert planned == pytest.approx(real, rel=0.1)


# GiB that the rank that needs most allocated in a rehearsal (docs/planner.md), for so many samples and
# micro-batches, uncompiled.
MEASURED: dict[str, tuple[float, str, int, int, int, str]] = {
    "pipeline": (2.31, "gpt2", 2, 2, 8, "pipeline"),
    "zero2 accumulated": (12.36, "llama-1b", 2, 2, 2, "zero2"),
    "fsdp": (5.42, "llama-1b", 4, 2, 1, "fsdp"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "fsdp" else pytest.mark.full) for n in MEASURED]
)
def test_a_layout_takes_what_it_took_on_an_h200(name):
    measured, model, world, rows, count, strategy = MEASURED[name]
    words = ["data.sequence_length=512", "training.compile=false"]
    recipe = load(model, [*words, f"distributed.strategy={strategy}"])
    choice = dataclasses.replace(choice_of(recipe, world, "bf16", count), rows=rows)
    cluster = Cluster(catalogue.find("h200"), world, world)
    plan = Planner(open_subject(recipe), cluster, "bf16").evaluate(choice)
    assert plan.memory.allocated / 2**30 == pytest.approx(measured, rel=0.035)


def test_a_plan_counts_what_is_not_torch_s_and_what_lies_between_tensors():
    recipe = make_recipe(fsdp())
    choice = choice_of(recipe, 8, "bf16")
    found = needed("llama", recipe, choice)
    assert set(found.parts) == set(memory.PARTS)
    assert (
        found.parts["context"] == memory.CONTEXT_BYTES + 2 * memory.NCCL
    )  # everyone, and the shards
    filled = sum(v for part, v in found.parts.items() if part not in ("slack", "context"))
    assert found.parts["slack"] == pytest.approx(memory.SLACK * filled)
    assert found.allocated == pytest.approx(filled)
    assert found.total == pytest.approx(filled * (1 + memory.SLACK) + found.parts["context"])


def test_buffers_of_a_model_are_counted():
    recipe = make_recipe()
    choice = choice_of(recipe, 1, "fp32")
    stage = stage_of(Little(BIG["gpt"]), recipe, choice.layout, 0)
    more = dataclasses.replace(stage, buffers=stage.buffers + 1000)
    nothing = load_of("gpt", "fp32", False, 6)
    assert (
        estimate_memory(choice, more, nothing).allocated
        - estimate_memory(choice, stage, nothing).allocated
        == 1000
    )


@pytest.mark.parametrize(("strategy", "world"), [("fsdp", 4), ("zero3", 4), ("zero2", 4)])
def test_offload_moves_bytes_to_the_host_and_loses_none(strategy, world):
    recipe = make_recipe({"strategy": strategy})
    here = choice_of(recipe, world, "bf16")
    how = "optimizer" if strategy == "zero2" else "all"
    away = needed("gpt", recipe, dataclasses.replace(here, offload=how))
    stays = {"zero2": ("weights", "gradients")}.get(strategy, ())
    assert away.host >= sum(
        v for part, v in away.static.items() if part not in ("gradients", *stays)
    )
    assert away.parts["optimizer"] == away.parts["master weights"] == 0
    assert (away.parts["weights"] > 0) == ("weights" in stays)
    assert away.total < needed("gpt", recipe, here).total
