"""Pipelines: where they are cut, how batches flow, and that evaluation goes through them too."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from muster.data.loader import Inputs
from muster.errors import RecipeError
from muster.models.decoder import Decoder
from muster.parallel.pipeline import SCHEDULES_KEPT
from muster.parallel.stages import cut_evenly, microbatches, stages_per_rank
from muster.recipe.distributed import PipelineOptions
from parallel.models import (
    GPT,
    LLAMA,
    make_batch,
    make_engine,
    make_functions,
    micro_batches,
    single,
    summed_loss,
    whole_gradients,
)


def dearest(costs: list[float], cuts: list[tuple[int, int]]) -> float:
    return max(sum(costs[start:stop]) for start, stop in cuts)


def test_cuts_are_as_even_as_any():
    draw = random.Random(5)
    for _ in range(200):
        layers = draw.randint(1, 8)
        parts = draw.randint(1, layers)
        costs = [float(draw.randint(1, 20)) for _ in range(layers)]
        cuts = cut_evenly(costs, parts)
        assert len(cuts) == parts
        assert [i for start, stop in cuts for i in range(start, stop)] == list(range(layers))
        assert all(start < stop for start, stop in cuts)
        best = min(
            dearest(costs, list(itertools.pairwise((0, *inner, layers))))
            for inner in itertools.combinations(range(1, layers), parts - 1)
        )
        assert dearest(costs, cuts) == best


def test_the_head_counts_as_work_of_the_last_stage():
    with torch.device("meta"):
        plan = Decoder(LLAMA).plan
        block = Decoder(LLAMA).blocks["0"]
    matrices = sum(p.numel() for p in block.parameters() if p.ndim == 2)
    assert plan.costs == (*[matrices] * 3, matrices + LLAMA.vocab * LLAMA.width)
    heavy = [1.0, 1.0, 1.0, 1.0 + 2.5]
    assert cut_evenly(heavy, 2) == [(0, 3), (3, 4)]


@pytest.mark.parametrize(
    ("asked", "ranks", "samples", "found"),
    [
        ("auto", 2, 64, 8),  # four per rank
        ("auto", 4, 64, 16),
        ("auto", 4, 9, 8),  # two per rank, not every sample alone
        ("auto", 4, 3, 4),  # never fewer than ranks
        (6, 4, 64, 6),
    ],
)
def test_microbatches_fill_the_pipeline(asked, ranks, samples, found):
    assert microbatches(PipelineOptions(microbatches=asked), ranks, samples) == found


@pytest.mark.parametrize(
    ("schedule", "asked", "words"),
    [
        ("1f1b", 1, "schedule 1f1b on 2 pipeline ranks needs at least 2, not 1; use 2, or auto"),
        ("interleaved", 3, "needs a multiple of 2, not 3; use 4, or auto"),
        ("zero-bubble", 1, "needs a multiple of 2, not 1; use 2, or auto"),
    ],
)
def test_microbatches_that_a_schedule_cannot_take_are_refused(schedule, asked, words):
    options = PipelineOptions(schedule=schedule, microbatches=asked)
    with pytest.raises(RecipeError) as caught:
        microbatches(options, 2, 64)
    assert str(caught.value).startswith("distributed.pipeline_options.microbatches: ")
    assert words in str(caught.value)
    assert microbatches(PipelineOptions(schedule="gpipe", microbatches=asked), 2, 64) == asked


def test_stages_per_rank_follow_the_schedule():
    def found(schedule: str, asked: Any = "auto") -> int:
        return stages_per_rank(PipelineOptions(schedule=schedule, stages_per_rank=asked))

    assert [found(s) for s in ("gpipe", "1f1b", "interleaved", "zero-bubble")] == [1, 1, 2, 2]
    assert found("interleaved", 3) == 3
    assert found("1f1b", 1) == 1
    with pytest.raises(RecipeError, match="2, but schedule 1f1b needs exactly 1; use auto, or"):
        found("1f1b", 2)
    with pytest.raises(RecipeError, match="1, but schedule zero-bubble needs 2 or more"):
        found("zero-bubble", 1)


def test_rows_added_to_a_batch_change_neither_loss_nor_gradient():
    batch = make_batch(GPT, 3)
    padded = batch.padded(5)
    assert padded["tokens"].shape == padded["targets"].shape == (5, 8)
    assert (padded.ids, padded.units) == (batch.ids, batch.units)
    assert batch.padded(2) is batch
    found = []
    for each in (batch, padded):
        engine = single(GPT)
        losses = engine.accumulate([each], make_functions(batch.units))
        found.append((float(losses[0]), whole_gradients(engine)))
    (loss, gradients), (same_loss, same) = found
    assert same_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(same[name], gradient, rtol=1e-5, atol=1e-7)


Found = tuple[dict[str, Tensor], float | None, Tensor | None]


def run(mesh, config, options: dict[str, Any]) -> Found:
    """This rank's gradients; on the last rank the loss too, and the logits of another batch."""
    distributed = {"strategy": "pipeline", "pipeline_options": options}
    engine = make_engine(mesh, config, distributed)
    batch = make_batch(config, 7)  # micro-batches of 2, 2, 2 and 1
    losses = engine.accumulate(
        micro_batches(mesh, distributed, batch, 4), make_functions(batch.units)
    )
    engine.grad_norm()
    gradients = whole_gradients(engine)
    engine.zero_grad()
    with torch.no_grad():
        logits = engine.forward(Inputs((make_batch(config, 3, seed=1)["tokens"],)))
    return gradients, float(sum(losses)) if losses else None, logits


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_training_and_evaluation_are_those_of_one_process(ranks, config, schedule):
    engine, batch, other = single(config), make_batch(config, 7), make_batch(config, 3, seed=1)
    (loss,) = engine.accumulate([batch], make_functions(batch.units))
    logits = engine.forward(Inputs((other["tokens"],)))
    expected = whole_gradients(engine)
    first, last = ranks(2)(run, config, {"schedule": schedule})
    assert first[1:] == (None, None)
    assert last[1] == pytest.approx(float(loss), rel=1e-6)
    torch.testing.assert_close(last[2], logits, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        summed_loss(last[2], other), summed_loss(logits, other), rtol=1e-6, atol=0
    )
    shared = {"embed.tokens.weight"} if config.tied else set()
    assert set(first[0]) | set(last[0]) == set(expected)
    assert set(first[0]) & set(last[0]) == shared
    for gradients in (first[0], last[0]):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def run_many_shapes(mesh) -> tuple[list[dict[str, Tensor]], int]:
    """The gradients of each batch; batches of six shapes, the first one again at the end."""
    distributed = {"strategy": "pipeline", "pipeline_options": {"schedule": "1f1b"}}
    engine, found = make_engine(mesh, GPT, distributed), []
    for time in (8, 7, 6, 5, 4, 3, 8):
        batch = make_batch(GPT, 7, time=time)
        engine.accumulate(micro_batches(mesh, distributed, batch, 4), make_functions(batch.units))
        engine.grad_norm()
        found.append(whole_gradients(engine))
        engine.zero_grad()
    return found, len(engine._schedules)


def test_buffers_of_few_shapes_are_kept_and_those_of_any_can_be_made_again(ranks):
    for gradients, kept in ranks(2)(run_many_shapes):
        assert kept == SCHEDULES_KEPT < 6
        torch.testing.assert_close(gradients[-1], gradients[0], rtol=0, atol=0)
