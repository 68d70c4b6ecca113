"""Tensor parallelism, parameter by parameter against one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from muster.models.configs import DecoderConfig
from muster.models.decoder import Decoder
from muster.parallel import tensor
from muster.recipe.distributed import TensorOptions
from parallel.models import (
    GPT,
    LLAMA,
    make_batch,
    make_engine,
    make_functions,
    micro_batches,
    single,
    whole_gradients,
)

# Sums over the ranks are taken in another order: about 1e-7 of the largest gradient.
TOLERANCE = 2e-6
QWEN3 = dataclasses.replace(LLAMA, qk_norm=True)
Found = tuple[dict[str, Tensor], Tensor, float]


def run(engine, pieces, batch) -> Found:
    """Gradients by name, and after them the logits of a batch of another size, and the loss."""
    losses = engine.accumulate(pieces, make_functions(batch.units))
    engine.grad_norm()
    gradients = whole_gradients(engine)
    engine.zero_grad()
    with torch.no_grad():
        logits = engine.forward(make_functions(1).inputs(other_batch(batch)))
    return gradients, logits, float(sum(losses))


def other_batch(batch):
    return dataclasses.replace(batch, tensors={k: t[:3] for k, t in batch.tensors.items()})


def run_split(mesh, config: DecoderConfig, options: dict[str, Any], time: int) -> Found:
    distributed = {"strategy": "tensor", "tensor_options": options}
    engine = make_engine(mesh, config, distributed, time=time)
    batch = make_batch(config, 6, time=time)
    return run(engine, micro_batches(mesh, distributed, batch, 2), batch)


def run_alone(config: DecoderConfig, time: int) -> Found:
    batch = make_batch(config, 6, time=time)
    return run(single(config), [batch], batch)


def close(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) <= TOLERANCE * max(1.0, float(one.abs().max()))


@pytest.mark.parametrize(
    ("sequence", "loss", "time"),
    [(True, True, 8), (True, False, 6), (False, True, 7), (False, False, 8)],
)
@pytest.mark.parametrize("config", [GPT, LLAMA, QWEN3], ids=["gpt", "llama", "qwen3"])
def test_every_gradient_is_that_of_one_process(ranks, config, sequence, loss, time):
    options = {"sequence_parallel": sequence, "loss_parallel": loss}
    gradients, logits, total = run_alone(config, time)
    for found_gradients, found_logits, found_total in ranks(2)(run_split, config, options, time):
        assert found_total == pytest.approx(total, rel=1e-6)
        assert set(found_gradients) == set(gradients)
        for name, gradient in gradients.items():
            assert close(gradient, found_gradients[name]), name
        assert close(logits, found_logits)


def gradients_of_shards(mesh, config: DecoderConfig) -> dict[str, Tensor]:
    distributed = {"strategy": "hybrid", "tensor": 2}
    engine, batch = make_engine(mesh, config, distributed), make_batch(config, 6)
    pieces = micro_batches(mesh, distributed, batch, 1)
    engine.accumulate(pieces, make_functions(batch.units))
    engine.grad_norm()
    return whole_gradients(engine)


def test_norms_of_heads_are_summed_over_tensor_ranks_and_shards(ranks):
    gradients, _, _ = run_alone(QWEN3, 8)
    assert gradients["blocks.0.attention.q_norm.weight"].abs().max() > 1e-5
    for found in ranks(4)(gradients_of_shards, QWEN3):
        for name, gradient in gradients.items():
            assert close(gradient, found[name]), name


def test_a_sequence_that_cannot_be_cut_evenly_is_refused(ranks):
    with pytest.raises(AssertionError, match="RecipeError") as caught:
        ranks(2)(run_split, GPT, {}, 7)
    words = caught.value.message
    assert "data.sequence_length: 7 is not a multiple of the 2 tensor ranks" in words
    assert "use 6, or set distributed.tensor_options.sequence_parallel=false" in words


def unmatched(mesh) -> None:
    from muster.parallel.layout import Layout

    axis = mesh.with_layout(Layout(tensor=2)).axes["tensor"]
    with torch.device("meta"):
        model = Decoder(GPT)
    plan = dataclasses.replace(model.plan, tensor={"blocks.*.attention.query": "heads"})
    tensor.split(model, axis, plan, TensorOptions())


def test_a_line_of_the_plan_that_touches_nothing_is_an_error(ranks):
    with pytest.raises(AssertionError, match=r"'blocks\.\*\.attention\.query' matches no layer"):
        ranks(2)(unmatched)
