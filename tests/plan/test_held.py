"""Which rank holds which part of which weight, without starting one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from muster.models.configs import DecoderConfig
from muster.parallel.layout import Layout
from muster.planner.shards import REST, cut, local_shape, stages
from muster.planner.subject import Subject
from parallel.models import GPT, LLAMA, Maker, make_recipe

UNEVEN = dataclasses.replace(GPT, layers=5, hidden=67)


def subject(config: DecoderConfig) -> Any:
    return Subject(make_recipe(), Maker(config))  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "parts"), [(67, 4), (3, 4), (8, 4), (5, 1), (1, 2)])
def test_rows_are_dealt_out_from_the_front_and_all_of_them(size, parts):
    rows = [cut(size, parts, part) for part in range(parts)]
    assert sum(rows) == size
    assert rows == sorted(rows, reverse=True)


def test_a_matrix_is_cut_as_the_model_s_plan_says():
    plan = subject(UNEVEN).plan
    shapes = {
        "blocks.3.feed_forward.up.weight": [(17, 16), (17, 16), (17, 16), (16, 16)],
        "blocks.3.feed_forward.up.bias": [(17,), (17,), (17,), (16,)],
        "blocks.3.feed_forward.down.weight": [(16, 17), (16, 17), (16, 17), (16, 16)],
        "blocks.3.feed_forward.down.bias": [(16,)] * 4,
        "blocks.3.attention_norm.weight": [(16,)] * 4,
        "embed.tokens.weight": [(10, 16), (10, 16), (10, 16), (7, 16)],
        "embed.positions.weight": [(8, 16)] * 4,
    }
    model = dict(subject(UNEVEN).model.named_parameters())
    for name, expected in shapes.items():
        whole = tuple(model[name].shape)
        assert [local_shape(name, whole, plan, 4, rank) for rank in range(4)] == expected
        assert local_shape(name, whole, plan, 1, 0) == whole


def test_first_and_last_stage_both_hold_a_tied_embedding():
    held = stages(subject(UNEVEN), Layout(pipeline=4))
    assert ["embed.tokens.weight" in {p.name for p in s.parameters} for s in held] == [
        True,
        False,
        False,
        True,
    ]
    assert sum(stage.layers for stage in held) == 5
    whole = stages(subject(UNEVEN), Layout())[0]
    assert sum(s.numel for s in held) == whole.numel + 37 * 16
    assert [(s.first, s.last) for s in held] == [
        (True, False),
        (False, False),
        (False, False),
        (False, True),
    ]


def test_an_interleaved_stage_gathers_its_parts_apart():
    first, last = stages(
        subject(dataclasses.replace(GPT, tied=False)), Layout(pipeline=2), per_rank=2
    )
    assert first.layers == last.layers == 2
    assert [group for group in first.groups() if group[1] is None] == [REST]
    assert [group for group in last.groups() if group[1] is None] == [(1, None)]
    assert len(first.groups()) == len(last.groups()) == 3


def test_groups_add_up_and_gradients_outside_blocks_come_first_with_the_head():
    (stage,) = stages(subject(LLAMA), Layout())
    assert sum(stage.groups().values()) == stage.numel == stage.shards(1)
    assert stage.groups()[REST] == 2 * 37 * 16 + 16
    assert stage.early == 37 * 16 + 16  # head and norm; the embedding's comes last
    (tied,) = stages(subject(GPT), Layout())
    assert tied.early == tied.groups()[REST]
    assert sum(stage.shards(4, shard) for shard in range(4)) == stage.numel
