"""Whisper in pipeline stages and in tensor shards, against the whole model in one process."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.data.loader import IGNORE, Batch, Inputs
from muster.models.configs import WhisperConfig
from muster.models.whisper import plan as whisper_plan
from muster.models.whisper.model import FreshWhisper, Whisper, WhisperPart
from muster.models.whisper.search import Search
from muster.parallel.apply import apply
from muster.parallel.engine import Engine, StepFunctions
from muster.parallel.layout import Layout, layout_for
from muster.parallel.mesh import Mesh
from muster.parallel.pipeline import equal_shapes
from muster.parallel.stages import cut_evenly
from muster.recipe.schema import Recipe
from muster.training.optimizer import make_optimizer
from parallel.models import whole_gradients

# 37 symbols and 22 hidden units do not divide by 4, 7 positions of the encoder not by 2.
SMALL = WhisperConfig(
    vocab=37,
    width=16,
    encoder_layers=2,
    encoder_heads=4,
    encoder_hidden=22,
    decoder_layers=3,
    decoder_heads=2,
    decoder_hidden=26,
    mels=6,
    source_positions=10,
    target_positions=12,
)
ROWS, END = 7, 3


class Loud(FreshWhisper):
    """So large that what is heard matters from the start."""

    def read(self, name: str, *region: Any) -> Tensor:
        return super().read(name, *region) * (1 if name.endswith("norm.weight") else 3)


@dataclasses.dataclass(frozen=True)
class Maker:
    def build_model(self) -> nn.Module:
        return Whisper(SMALL)

    def build_part(self, start: int, stop: int) -> nn.Module:
        return WhisperPart(SMALL, start, stop)

    def weights(self) -> FreshWhisper:
        return Loud(7)


def make_batch() -> Batch:
    """Texts of different lengths."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(ROWS, 14, SMALL.mels, generator=generator)
    tokens = torch.randint(SMALL.vocab, (ROWS, 9), generator=generator)
    targets = torch.randint(SMALL.vocab, (ROWS, 9), generator=generator)
    for row in range(ROWS):
        targets[row, 2 + row :] = IGNORE
    units = int((targets != IGNORE).sum())
    tensors = {"features": features, "tokens": tokens, "targets": targets}
    return Batch(list(range(ROWS)), tensors, units, units, targets.numel())


def pieces_of(batch: Batch, count: int, layout: Layout, rank: int) -> list[Batch]:
    """This rank's micro-batches, each as long as its longest text."""
    data, found = layout.data_rank(rank), []
    for i in range(count):
        rows = list(range(ROWS))[data :: layout.data_ranks][i::count]
        mine = {name: t[rows] for name, t in batch.tensors.items()}
        longest = int((mine["targets"] != IGNORE).sum(1).max())
        mine |= {name: mine[name][:, :longest] for name in ("tokens", "targets")}
        found.append(Batch(rows, mine, int((mine["targets"] != IGNORE).sum()), 0, 0))
    return found


def functions(units: int) -> StepFunctions:
    def loss(logits: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(
            logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORE, reduction="sum"
        )

    return StepFunctions(
        prepare=lambda batch: batch,
        inputs=lambda batch: Inputs((batch["features"],), {"tokens": batch["tokens"]}),
        loss=loss,
        autocast=lambda: torch.autocast("cpu", enabled=False),
        scale=1.0 / units,
    )


def make_engine(
    mesh: Mesh, distributed: dict[str, Any], others: dict[str, Any] | None = None
) -> Engine:
    others = others or {}
    training = {"steps": 3, "global_batch_size": 8, "precision": "fp32"}
    recipe = Recipe.model_validate(
        {
            "task": "speech-seq2seq",
            "model": {"preset": "whisper-micro", **others.get("model", {})},
            "training": training | others.get("training", {}),
            "distributed": distributed,
        }
    )
    mesh = mesh.with_layout(layout_for(recipe.distributed, mesh.world))
    return apply(
        Maker(), mesh, recipe, "fp32", lambda named: make_optimizer(recipe.training, named)
    )


@contextmanager
def layer_costs(costs: tuple[int, ...]) -> Iterator[None]:
    """To cut where a test wants it."""
    usual, whisper_plan._costs = whisper_plan._costs, lambda config: costs
    try:
        yield
    finally:
        whisper_plan._costs = usual


SEARCHES = [Search(END, limit=6, beams=beams, suppress=(5,)) for beams in (1, 3)]
Found = tuple[dict[str, Tensor], float | None, float, list[list[list[int]]]]


def run(engine: Engine, batch: Batch, pieces: list[Batch]) -> Found:
    """Gradients, the loss, the gradient norm after an optimizer step, and what two searches find."""
    losses = engine.accumulate(pieces, functions(batch.units))
    engine.grad_norm()
    gradients = whole_gradients(engine)
    engine.step(1e-2)
    engine.zero_grad()
    engine.accumulate(pieces, functions(batch.units))
    norm = float(engine.grad_norm())
    engine.zero_grad()
    prompt = torch.tensor([[1, 2]]).expand(ROWS, -1)
    with torch.no_grad():
        texts = [
            engine.forward(Inputs((batch["features"], prompt, search))).tolist()
            for search in SEARCHES
        ]
    return gradients, float(sum(losses)) if losses else None, norm, texts


def run_split(mesh: Mesh, costs: tuple[int, ...], count: int, distributed: dict[str, Any]) -> Found:
    with layer_costs(costs):
        engine = make_engine(mesh, distributed)
    batch = make_batch()
    return run(engine, batch, pieces_of(batch, count, engine.mesh.layout, mesh.rank))


@pytest.fixture(scope="module")
def alone() -> Found:
    engine = make_engine(Mesh(0, 0, Layout(), torch.device("cpu"), None), {})
    batch = make_batch()
    return run(engine, batch, [batch])


def assert_same(alone: Found, found: list[Found]) -> None:
    gradients, loss, norm, texts = alone
    assert len({tuple(row) for row in texts[0]}) > 1  # what is heard matters
    assert set().union(*(f[0] for f in found)) == set(gradients)
    for mine, my_loss, my_norm, my_texts in found:
        assert my_loss is None or my_loss == pytest.approx(loss, rel=1e-6)
        assert my_norm == pytest.approx(norm, rel=1e-5)
        assert my_texts == texts
        for name, gradient in mine.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-5, msg=name)


EVEN = (1, 1, 1, 1, 1)
PIPELINES = {
    "between": (EVEN, [(0, 2), (2, 5)], "1f1b"),
    "in the encoder": ((9, 1, 1, 1, 1), [(0, 1), (1, 5)], "1f1b"),
    "in the decoder": ((1, 1, 1, 1, 9), [(0, 4), (4, 5)], "gpipe"),
    "interleaved": (EVEN, [(0, 1), (1, 2), (2, 3), (3, 5)], "interleaved"),
    "one rank twice": ((1, 1, 9, 9, 9), [(0, 2), (2, 3), (3, 4), (4, 5)], "interleaved"),
}


@pytest.mark.parametrize("cut", PIPELINES)
def test_stages_give_the_gradients_and_texts_of_one_process(ranks, alone, cut):
    costs, cuts, schedule = PIPELINES[cut]
    assert cut_evenly(costs, len(cuts)) == cuts
    options = {"strategy": "pipeline", "pipeline_options": {"schedule": schedule}}
    assert_same(alone, ranks(2)(run_split, costs, 4, options))


@pytest.mark.parametrize("split_loss", [True, pytest.param(False, marks=pytest.mark.full)])
def test_tensor_shards_give_the_gradients_and_texts_of_one_process(ranks, alone, split_loss):
    options = {"strategy": "tensor", "tensor_options": {"loss_parallel": split_loss}}
    assert_same(alone, ranks(2)(run_split, EVEN, 2, options))


@pytest.mark.full
def test_tensor_shards_of_stages_give_them_too(ranks, alone):
    options = {"strategy": "hybrid", "tensor": 2, "pipeline": 2}
    assert_same(alone, ranks(4)(run_split, EVEN, 4, options))


def test_parts_have_the_parameters_of_the_whole():
    with torch.device("meta"):
        whole = {n: p.shape for n, p in Whisper(SMALL).named_parameters()}
        for stop in range(1, 5):
            parts = [WhisperPart(SMALL, 0, stop), WhisperPart(SMALL, stop, 5)]
            found = [dict(part.named_parameters()) for part in parts]
            assert {n: p.shape for f in found for n, p in f.items()} == whole
            both = {"model.decoder.embed_tokens.weight"} if stop > 2 else set()
            assert set(found[0]) & set(found[1]) == both


def test_micro_batches_get_equal_shapes_and_ignored_targets():
    pieces = [piece.padded(2) for piece in pieces_of(make_batch(), 4, Layout(), 0)]
    assert len({p["tokens"].shape for p in pieces}) > 1
    padded = equal_shapes(pieces)
    assert {p["tokens"].shape[1] for p in padded} == {8}
    for before, after in zip(pieces, padded, strict=True):
        length = before["targets"].shape[1]
        assert torch.equal(after["targets"][:, :length], before["targets"])
        assert (after["targets"][:, length:] == IGNORE).all()
        assert after["features"] is before["features"]


REFUSED = {
    "zero-bubble": (
        {"strategy": "pipeline", "pipeline_options": {"schedule": "zero-bubble"}},
        {},
        "distributed.pipeline_options.schedule: zero-bubble",
    ),
    "frozen": ({"strategy": "pipeline"}, {"model": {"freeze_encoder": True}}, "freeze_encoder"),
    "dropout": ({"strategy": "tensor"}, {"model": {"dropout": 0.1}}, "masks; set it to 0"),
    "smoothing": (
        {"strategy": "tensor"},
        {"training": {"label_smoothing": 0.1}},
        "distributed.tensor_options.loss_parallel=false",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_split_is_refused_by_name(ranks, what):
    distributed, others, words = REFUSED[what]
    with pytest.raises(AssertionError, match="RecipeError") as caught:
        ranks(2)(make_engine, distributed, others)
    assert words in caught.value.message


def train(engine: Engine, steps: int) -> float:
    """The gradient norm after so many steps."""
    batch = make_batch()
    pieces, compute = pieces_of(batch, 4, Layout(), 0), functions(batch.units)
    for _ in range(steps):
        engine.accumulate(pieces, compute)
        engine.step(1e-2)
        engine.zero_grad()
    engine.accumulate(pieces, compute)
    norm = float(engine.grad_norm())
    engine.zero_grad()
    return norm


def reload(mesh: Mesh, costs: tuple[int, ...], distributed: dict[str, Any]) -> tuple[float, float]:
    """The norms of an engine that trained on, and of a new one that loaded its state."""
    with layer_costs(costs):
        engine, other = make_engine(mesh, distributed), make_engine(mesh, distributed)
    train(engine, 2)
    saved = copy.deepcopy(engine.state())
    live = other.state()
    with torch.no_grad():
        for here, there in ((live["model"], saved["model"]), *_moments(live, saved)):
            for name, tensor in here.items():
                tensor.copy_(there[name])
    other.load_state(saved)
    return train(engine, 1), train(other, 1)


def _moments(live: dict[str, Any], saved: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(live["optimizer"][m], saved["optimizer"][m]) for m in ("exp_avg", "exp_avg_sq")]


def test_a_rank_that_holds_the_tied_embedding_twice_loads_it_twice(ranks):
    costs, _, schedule = PIPELINES["one rank twice"]
    options = {"strategy": "pipeline", "pipeline_options": {"schedule": schedule}}
    for trained, loaded in ranks(2)(reload, costs, options):
        assert trained == loaded
