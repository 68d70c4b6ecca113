from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from torch import nn

from muster.data.loader import Batch, Inputs
from muster.errors import MusterError, RecipeError
from muster.models.plan import ParallelPlan
from muster.parallel.apply import apply
from muster.parallel.context import share
from muster.parallel.engine import StepFunctions
from muster.parallel.layout import Layout, layout_for
from muster.parallel.stages import cut_evenly
from muster.planner.dtensor_recorder import DTensorRecorder
from muster.planner.fake_cuda import autocast
from muster.planner.rank_recorder import (
    Sent,
    count_messages,
    recording,
    static_bytes,
    step,
    track_static,
)
from muster.planner.simulate import (
    Simulated,
    representative_ranks,
    simulate,
    simulate_all,
)
from muster.planner.subject import Subject
from muster.planner.trace import Trace
from muster.recipe.load import load
from muster.tasks import build_task
from muster.training.optimizer import make_optimizer
from parallel import models
from parallel.models import Maker, inputs_of, make_batch, make_recipe, summed_loss
from pool import RankError
from processes import python_path

ROWS = 2


@dataclass(frozen=True)
class Little(Maker):
    """A decoder of the strategies' tests, as much of a task as a step needs."""

    def example(self) -> str:
        return "any"

    def collate(self, samples: Sequence[Any], epoch: int) -> Batch:
        return make_batch(self.config, len(samples))

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def inputs(self, batch: Batch) -> Inputs:
        return inputs_of(batch)

    def loss(self, output: Any, batch: Batch) -> Any:
        return summed_loss(output, batch)


@dataclass(frozen=True)
class Frozen(Little):
    """All but the blocks stays as it is."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for name, p in model.named_parameters():
            p.requires_grad_(name.startswith("blocks."))
        return model


def on_ranks(mesh, task, distributed, count, precision) -> Any:
    """The third step of real ranks: by then pipelines and DDP have settled. What was sent and is held."""
    recipe = make_recipe(distributed)
    mesh = mesh.with_layout(layout_for(recipe.distributed, mesh.world))
    engine = apply(
        task, mesh, recipe, precision, lambda named: make_optimizer(recipe.training, named)
    )
    functions = StepFunctions(task.prepare, task.inputs, task.loss, lambda: autocast(precision))
    batches = [share(make_batch(task.config, ROWS), mesh.layout, mesh.rank)] * count
    recorder = DTensorRecorder()
    track_static(engine, recorder)
    with recorder, recording(recorder, engine):
        for _ in range(3):
            engine.zero_grad()
            recorder.trace = Trace()
            step(engine, batches, functions, recorder)
    return count_messages(recorder.trace.messages), static_bytes(engine)


def simulated(
    task: Little,
    distributed: dict[str, Any],
    world: int,
    rank: int = 0,
    count: int = 1,
    precision: str = "fp32",
    rows: int = ROWS,
    **training: Any,
) -> Simulated:
    recipe = make_recipe(distributed, **training)
    layout = layout_for(recipe.distributed, world)
    subject = Subject(recipe, task)  # type: ignore[arg-type]
    asked = {"recipe": recipe, "precision": precision, "rank": rank, "rows": rows}
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(simulate, subject, layout, **asked, accumulation=count).result()


GPT, LLAMA = Little(models.GPT), Little(models.LLAMA)


def wide(layers: int) -> Little:
    return Little(replace(models.LLAMA, layers=layers, width=256))


def hybrid(**sizes: int) -> dict[str, Any]:
    return {"strategy": "hybrid", **sizes}


def tensor(sequence: bool, loss: bool) -> dict[str, Any]:
    return {
        "strategy": "tensor",
        "tensor_options": {"sequence_parallel": sequence, "loss_parallel": loss},
    }


CASES: dict[str, tuple[Little, dict[str, Any], int, int, str]] = {
    "ddp": (GPT, {"strategy": "ddp", "ddp": {"bucket_mb": 0.01}}, 2, 2, "fp32"),
    "ddp compressed": (GPT, {"strategy": "ddp", "ddp": {"compression": "bf16"}}, 2, 1, "fp32"),
    "ddp unused": (
        LLAMA,
        {"strategy": "ddp", "ddp": {"bucket_mb": 0.01, "find_unused_parameters": True}},
        2,
        1,
        "fp32",
    ),
    "fsdp": (GPT, {"strategy": "fsdp"}, 2, 1, "fp32"),
    "fsdp frozen": (Frozen(models.GPT), {"strategy": "fsdp"}, 2, 2, "bf16"),
    "fsdp bf16": (LLAMA, {"strategy": "fsdp"}, 4, 3, "bf16"),
    "fsdp keeps": (GPT, {"strategy": "fsdp", "fsdp": {"sharding": "shard_grad_op"}}, 2, 2, "bf16"),
    "hsdp": (LLAMA, {"strategy": "hsdp"}, 4, 1, "fp32"),
    "tensor": (LLAMA, tensor(True, True), 2, 2, "fp32"),
    "tensor bf16": (LLAMA, tensor(True, True), 2, 1, "bf16"),
    "tensor alone": (GPT, tensor(False, False), 2, 1, "fp32"),
    "pipeline": (LLAMA, {"strategy": "pipeline"}, 2, 4, "bf16"),
    "pipeline tied": (GPT, {"strategy": "pipeline"}, 4, 4, "fp32"),
    "pipeline interleaved": (
        LLAMA,
        {"strategy": "pipeline", "pipeline_options": {"schedule": "interleaved"}},
        2,
        4,
        "fp32",
    ),
    "shard × pipeline": (LLAMA, hybrid(shard=2, pipeline=2), 4, 4, "bf16"),
    "shard × tensor": (LLAMA, hybrid(shard=2, tensor=2), 4, 2, "bf16"),
    "tensor × pipeline": (LLAMA, hybrid(tensor=2, pipeline=2), 4, 2, "bf16"),
    "context": (LLAMA, {"strategy": "context"}, 2, 2, "bf16"),
    "context × tensor": (GPT, hybrid(context=2, tensor=2), 4, 1, "fp32"),
}


def in_all(sent: Counter[Sent]) -> Counter[str]:
    """Bytes by kind of message."""
    total: Counter[str] = Counter()
    for one, times in sent.items():
        total[one.kind] += times * one.bytes
    return total


ORDINARY = ("pipeline tied", "fsdp frozen")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ORDINARY else pytest.mark.full) for n in CASES]
)
def test_a_fake_cluster_sends_and_holds_what_real_ranks_do(ranks, name):
    task, distributed, world, count, precision = CASES[name]
    real = ranks(world)(on_ranks, task, distributed, count, precision)
    piped = (
        "pipeline" in name
    )  # elsewhere the last rank, whose shards are the smallest, says it all
    for rank in (0, world - 1) if piped else (world - 1,):
        sent, held = real[rank]
        found = simulated(task, distributed, world, rank, count, precision)
        if name.startswith("ddp"):  # which gradient is ready first decides what shares a bucket
            assert in_all(found.sent) == in_all(sent)
        else:
            assert found.sent == sent, f"rank {rank}"
        assert found.static == held, f"rank {rank}"


def test_what_real_ranks_refuse_a_fake_cluster_refuses_in_the_same_words(ranks):
    for distributed, world in (
        (hybrid(tensor=4), 4),
        ({"strategy": "fsdp", "fsdp": {"wrap": ["Nothing"]}}, 2),
    ):
        with pytest.raises(RankError) as real:
            ranks(world)(on_ranks, LLAMA, distributed, 1, "fp32")
        with pytest.raises(RecipeError) as fake:
            simulated(LLAMA, distributed, world)
        assert (real.value.kind, real.value.message) == ("RecipeError", str(fake.value))


def test_ddp_with_context_ranks_is_refused_with_what_to_simulate_instead():
    with pytest.raises(MusterError, match=r"context 2 \(DDP\).*strategy=fsdp"):
        simulated(GPT, {"strategy": "ddp", "context": 2}, 2)


def test_deepspeed_is_refused_with_what_to_simulate_instead():
    with pytest.raises(MusterError, match=r"zero3 over 4 ranks.*strategy=fsdp"):
        simulated(GPT, {"strategy": "zero3"}, 4)


def test_the_optimizers_state_and_gradients_are_there_at_the_peak():
    """From the second step on; and DDP never gives its buckets back."""
    found = simulated(GPT, {"strategy": "ddp"}, 2, rows=64)
    assert found.peak == sum(found.at_peak.values())
    assert found.at_peak["activations"] > found.static["weights"]
    for part, size in found.static.items():
        assert size <= found.at_peak[part] <= size + 512 * 3 * 100  # allocations are rounded up


@pytest.mark.full
def test_gathered_weights_are_given_up_after_each_block():
    few, many = (simulated(wide(layers), {"strategy": "fsdp"}, 4) for layers in (4, 8))
    assert many.at_peak["buffers"] == pytest.approx(few.at_peak["buffers"], rel=0.02)
    kept = simulated(
        wide(8),
        {"strategy": "fsdp", "fsdp": {"sharding": "shard_grad_op"}},
        4,
    )
    assert kept.at_peak["buffers"] > 1.5 * many.at_peak["buffers"]


@pytest.mark.full
def test_checkpointing_frees_activations_and_repeats_messages_of_tensor_ranks():
    distributed = hybrid(tensor=2, shard=2)
    plain, again = (
        simulated(LLAMA, distributed, 4, rows=64, activation_checkpointing=mode)
        for mode in ("none", "full")
    )
    assert again.at_peak["activations"] < 0.6 * plain.at_peak["activations"]
    assert again.static == plain.static
    assert again.totals["all_gather"][0] > plain.totals["all_gather"][0]


@pytest.mark.full
def test_earlier_stages_hold_more_micro_batches():
    first, last = (
        simulated(LLAMA, {"strategy": "pipeline"}, 4, rank, count=8, rows=64) for rank in (0, 3)
    )
    assert (first.layers, last.layers) == (1, 1)
    assert first.peak > last.peak
    assert sum(sent.kind == "recv" for sent in first.sent) == 1  # gradients alone, of one size
    assert {s.phase for s in first.sent if s.kind in ("send", "recv")} == {"pipeline"}


@pytest.mark.full
def test_offloaded_shards_are_the_hosts():
    here = simulated(LLAMA, {"strategy": "fsdp"}, 2)
    away = simulated(LLAMA, {"strategy": "fsdp", "fsdp": {"cpu_offload": True}}, 2)
    assert here.host == 0
    assert away.host == sum(away.static.values()) == sum(here.static.values())
    assert {"weights", "optimizer", "host"}.isdisjoint(away.at_peak)
    assert away.sent == here.sent


@pytest.mark.full
def test_a_compiled_model_sends_the_same_and_keeps_less():
    plain = simulated(LLAMA, {"strategy": "fsdp"}, 2, rows=64)
    compiled = simulated(LLAMA, {"strategy": "fsdp"}, 2, rows=64, compile=True)
    assert compiled.sent == plain.sent
    assert compiled.static == plain.static
    assert compiled.at_peak["activations"] < plain.at_peak["activations"]
    assert not compiled.notes
    assert "uncompiled" in simulated(LLAMA, hybrid(tensor=2), 2, compile=True).notes[0]


def test_ranks_to_try_are_the_first_the_fullest_and_the_last_stage():
    plan = ParallelPlan(("Block",), costs=(2,) * 9 + (3,))
    assert representative_ranks(Layout(shard=64, tensor=2), plan) == [0]
    assert representative_ranks(Layout(pipeline=2, tensor=2, shard=3), plan) == [0, 6]
    middle = replace(plan, costs=(2, 2, 2, 2, 2, 4))
    assert cut_evenly(middle.costs, 4) == [(0, 1), (1, 3), (3, 5), (5, 6)]
    assert representative_ranks(Layout(pipeline=4, tensor=2), middle) == [0, 2, 6]


def micro(layout: Layout, ranks: Sequence[int] | None = None, **sizes: int) -> list[Simulated]:
    recipe = load("llama-micro", [])
    subject = Subject(recipe, build_task(recipe))
    return simulate_all(
        subject, layout, recipe=recipe, precision="bf16", ranks=ranks, rows=1, **sizes
    )


@pytest.mark.full
def test_each_rank_is_simulated_in_a_process_of_its_own():
    first, last = micro(Layout(pipeline=2, shard=2), microbatches=2)
    assert (first.rank, last.rank) == (0, 2)
    assert first.parameters != last.parameters
    told = json.loads(json.dumps(first.as_dict()))
    assert sum(s["times"] for s in told["sent"]) == first.sent.total()
    assert not dist.is_initialized()


@pytest.mark.full
def test_a_childs_refusal_comes_out_in_its_own_words():
    with pytest.raises(RecipeError, match=r"^distributed\.tensor: 3 does not divide the"):
        micro(Layout(tensor=3))
    with pytest.raises(RecipeError, match=r"^distributed\.pipeline: 99 ranks"):
        micro(Layout(pipeline=99))


@pytest.mark.full
def test_an_error_of_torchs_names_the_rank_and_the_layout():
    with pytest.raises(MusterError, match=r"pipeline 2: rank 1 fails with ValueError: .*microb"):
        micro(Layout(pipeline=2), [1], microbatches=1)


def test_a_killed_child_is_told_of(tmp_path, monkeypatch):
    """One of those that have not begun: they wait for it."""
    wait = "import sys, time\nif 'spawn_main' in ' '.join(sys.orig_argv):\n    time.sleep(600)\n"
    (tmp_path / "sitecustomize.py").write_text(wait)
    for name, value in python_path(tmp_path).items():
        monkeypatch.setenv(name, value)
    before = set(psutil.Process().children())  # ranks of other tests

    def kill() -> None:
        while True:
            for child in set(psutil.Process().children()) - before:
                with suppress(psutil.Error):  # another, that has just ended
                    if "spawn_main" in " ".join(child.cmdline()):
                        child.kill()
                        return
            time.sleep(0.01)

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(MusterError, match=r"shard 2: a process was killed.*memory"):
        micro(Layout(shard=2))


@pytest.mark.serial
@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "microbatches"),
    [
        (Layout(shard=64), 1),
        (Layout(tensor=8, shard=8), 1),
        (Layout(tensor=8, pipeline=8), 16),
        (Layout(tensor=8, pipeline=8, shard=16), 16),
    ],
    ids=str,
)
def test_llama_70b_simulates_within_two_minutes_and_16_gib(layout, microbatches):
    recipe = load("llama-1b", ["model.preset=llama-70b"])
    subject = Subject(recipe, build_task(recipe))
    begin = time.perf_counter()
    found = simulate_all(
        subject, layout, recipe=recipe, precision="bf16", rows=1, microbatches=microbatches
    )
    assert time.perf_counter() - begin < 120
    assert sum(sorted(r.process for r in found)[-2:]) < 16 * 2**30
    for one in found:
        assert one.parameters == pytest.approx(
            subject.parameters / layout.world * layout.replicate, rel=0.1
        )
