"""Compiled code needs weights that begin at multiples of 16 bytes, and DeepSpeed packs them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from muster.parallel.apply import apply
from muster.parallel.deepspeed import misaligned
from muster.parallel.layout import layout_for
from muster.training.optimizer import make_optimizer
from parallel.models import GPT, Maker, make_recipe


class WithOddFirst(Maker):
    """The first parameter has three elements; blocks have a multiple of 16 where `hidden` is one."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.odd = nn.Parameter(torch.zeros(3))
        return model


def judge(mesh, hidden: int) -> str:
    pytest.importorskip("deepspeed")
    maker = WithOddFirst(dataclasses.replace(GPT, hidden=hidden))
    recipe = make_recipe({"strategy": "zero2"})
    mesh = mesh.with_layout(layout_for(recipe.distributed, mesh.world))
    engine = apply(
        maker, mesh, recipe, "fp32", lambda named: make_optimizer(recipe.training, named)
    )
    return misaligned(list(engine.parts[0].blocks.children())) or "aligned"


def test_weights_of_an_odd_size_do_not_misalign_the_blocks(ranks):
    assert ranks(2)(judge, 32) == ["aligned", "aligned"]


def test_blocks_of_an_odd_size_are_found(ranks):
    for said in ranks(2)(judge, 22):
        assert "of a DecoderBlock does not begin at a multiple of 16 bytes" in said
