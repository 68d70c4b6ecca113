"""Whisper in shards: the gradient and the words of one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.data.loader import Batch, Inputs
from muster.models.weights import Weights
from muster.models.whisper.folder import WhisperWeights, read_config
from muster.models.whisper.model import Whisper
from muster.models.whisper.search import Search
from muster.parallel.apply import apply
from muster.parallel.engine import Engine, StepFunctions
from muster.parallel.layout import Layout, layout_for
from muster.parallel.mesh import Mesh
from muster.training.optimizer import make_optimizer
from parallel.models import make_recipe, summed_loss
from whisper_reference import END, NO_TIMESTAMPS, START, features, make, tokens

ROWS, LIMIT = 6, 18
SHARES = (slice(0, 4), slice(4, 6))  # of two ranks


@dataclass(frozen=True)
class Maker:
    folder: Path
    freeze_encoder: bool

    def build_model(self) -> nn.Module:
        return Whisper(read_config(self.folder), self.freeze_encoder)

    def build_part(self, start: int, stop: int) -> nn.Module:
        raise NotImplementedError

    def weights(self) -> Weights:
        return WhisperWeights(self.folder, read_config(self.folder))


def any_rank(unfinished: bool) -> bool:
    flag = torch.tensor(unfinished, dtype=torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def measure(
    mesh: Mesh, maker: Maker, distributed: dict[str, Any], rows: slice
) -> tuple[float, dict[int, list[list[int]]]]:
    """The gradient norm of a step, and what each search then says of `rows`."""
    recipe = make_recipe(distributed, global_batch_size=ROWS)
    engine: Engine = apply(
        maker, mesh, recipe, "fp32", lambda named: make_optimizer(recipe.training, named)
    )
    heard, said = features(ROWS)[rows], tokens(ROWS)[rows]
    held = {"features": heard, "tokens": said[:, :-1], "targets": said[:, 1:]}
    batch = Batch(list(range(len(heard))), held, said[:, 1:].numel(), 0, 0)
    functions = StepFunctions(
        prepare=lambda batch: batch,
        inputs=lambda batch: Inputs((batch["features"], batch["tokens"])),
        loss=summed_loss,
        autocast=lambda: torch.autocast("cpu", enabled=False),
        scale=1.0 / tokens(ROWS)[:, 1:].numel(),
    )
    engine.accumulate([batch], functions)
    norm = float(engine.grad_norm())
    engine.step(0.0)
    engine.zero_grad()
    engine.parts[0].eval()
    return norm, {beams: search(engine, heard, beams, mesh.world) for beams in (1, 3)}


@torch.no_grad()
def search(engine: Engine, heard: Tensor, beams: int, world: int) -> list[list[int]]:
    prompt = torch.tensor([[START, NO_TIMESTAMPS]] * len(heard))
    how = Search(END, LIMIT, beams, any_rank=any_rank if world > 1 else bool)
    found = engine.forward(Inputs((heard, prompt), {"search": how})).tolist()
    return [row[: row.index(END)] if END in row else row for row in found]


def on_rank(mesh: Mesh, maker: Maker, distributed: dict[str, Any]) -> Any:
    arranged = mesh.with_layout(layout_for(make_recipe(distributed).distributed, mesh.world))
    return measure(arranged, maker, distributed, SHARES[mesh.rank])


ORDINARY = {("ddp", False), ("fsdp", True), ("zero2", False)}


@pytest.mark.parametrize(
    ("strategy", "freeze_encoder"),
    [
        pytest.param(
            strategy,
            frozen,
            id=f"{strategy}-{'frozen encoder' if frozen else 'whole'}",
            marks=() if (strategy, frozen) in ORDINARY else pytest.mark.full,
        )
        for strategy in ("ddp", "fsdp", "zero2", "zero3")
        for frozen in (False, True)
    ],
)
def test_two_ranks_have_the_gradient_and_the_words_of_one(
    ranks: Any, strategy: str, freeze_encoder: bool, tmp_path: Path
):
    make(0, 0.5).save_pretrained(tmp_path)
    maker = Maker(tmp_path, freeze_encoder)
    alone = Mesh(0, 0, Layout(), torch.device("cpu"), None)
    norm, words = measure(alone, maker, {}, slice(None))
    assert len({len(row) for row in words[1]}) > 1
    found = ranks(2)(on_rank, maker, {"strategy": strategy})
    for their_norm, _ in found:
        assert their_norm == pytest.approx(norm, rel=1e-5)
    for beams, expected in words.items():
        assert found[0][1][beams] + found[1][1][beams] == expected
