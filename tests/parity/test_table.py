"""Law 1: the strategy never changes the maths."""

from __future__ import annotations

import pytest
import torch

from muster.checks.parity import ROWS, TOLERANCE, StrategyRow, distance
from parity.table import train_row

MODELS = ("gpt", "llama", "lmu", "whisper")
# Models and accumulations in turn. The rest with --full: among it shard_grad_op, tensor × ddp, tensor ×
# pipeline and the three-dimensional layout, whose parts are tested here.
ORDINARY = {
    ("ddp", 2, "gpt", 4),
    ("fsdp", 2, "lmu", 4),
    ("fsdp", 4, "llama", 1),
    ("hsdp", 4, "gpt", 1),
    ("zero1", 2, "gpt", 4),
    ("zero2", 2, "gpt", 1),
    ("zero3", 2, "gpt", 4),
    ("tensor", 2, "gpt", 4),
    ("tensor, plain", 2, "gpt", 1),
    ("pipeline 1f1b", 2, "gpt", 4),
    ("pipeline gpipe", 2, "llama", 1),
    ("pipeline interleaved", 2, "gpt-deep", 4),
    ("pipeline zero-bubble", 2, "gpt-deep", 1),
    ("tensor × fsdp", 4, "gpt", 1),
    ("pipeline × fsdp", 4, "gpt", 4),
    ("pipeline 1f1b", 2, "whisper", 4),
    ("context", 2, "llama", 4),
    ("context × ddp", 4, "gpt", 1),
    ("context × fsdp", 4, "llama", 1),
}


def fits(row: StrategyRow, model: str) -> bool:
    """Whisper has a tensor plan and stages, but none whose backward pass can be split, and no context plan."""
    if model == "whisper" and not row.decoders_only:
        return "zero-bubble" not in row.name
    if row.decoders_only and not model.startswith(("gpt", "llama")):
        return False
    return model != "lmu" or not row.transformers_only


def on_gpus(name: str, world: int, model: str, accumulation: int) -> bool:
    """Every strategy: on 2 ranks with every model, accumulating; on 4 with two models, in turn."""
    if world == 2:
        return accumulation == 4
    turn = [row.name for row in ROWS].index(name) % 2
    models = (("gpt", "lmu"), ("llama", "whisper"))[turn]
    return world == 4 and accumulation == 1 and model.startswith(models)


def cells():
    for row in ROWS:
        for world in row.worlds:
            for model in MODELS:
                if not fits(row, model):
                    continue
                if row.name.startswith("pipeline ") and row.multiple == 1:
                    each = 2 if row.name.endswith(("interleaved", "zero-bubble")) else 1
                    deep = ("", "", "-deep") if model == "whisper" else ("", "-deep", "-deepest")
                    model += dict(zip((2, 4, 8), deep, strict=True))[each * world]
                elif model == "whisper" and "tensor" in row.name:
                    model += "-heads"
                for accumulation in (1, 4):
                    key = (row.name, world, model, accumulation)
                    marks = [] if key in ORDINARY else [pytest.mark.full]
                    if on_gpus(*key):
                        marks.append(pytest.mark.both)
                    yield pytest.param(
                        row, world, model, accumulation, marks=marks, id="-".join(map(str, key))
                    )


@pytest.mark.parametrize(("row", "world", "model", "accumulation"), list(cells()))
def test_a_strategy_gives_the_course_of_one_process(
    course_of, record_property, row: StrategyRow, world: int, model: str, accumulation: int
):
    if "zero-bubble" in row.name and torch.__version__ < (2, 13):
        pytest.skip("this torch cannot split the backward pass of a decoder")
    found = distance(course_of(model, 1), course_of(model, world, row.options, accumulation))
    record_property("row", f"| {row.name} | {world} | {model} | {accumulation} | {found}")
    assert found.small, found


def test_the_ordinary_rows_exist():
    """A renamed row must not silently drop out of the ordinary tests."""
    names = {(row.name, world) for row in ROWS for world in row.worlds}
    assert {key[:2] for key in ORDINARY} <= names


def broken_row(mesh, folder, model, corpus, options):
    """Each rank divides by its own units instead of the global batch's: the usual mistake."""
    from muster.training import loop

    right = loop._accumulate

    def wrong(job, step, micro_batches, units):
        own = sum(b.units for b in micro_batches) * job.mesh.layout.data_ranks
        return right(job, step, micro_batches, own)

    loop._accumulate = wrong
    try:
        return train_row(mesh, folder, model, corpus, options, 1)
    finally:
        loop._accumulate = right


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.full)])
def test_the_table_catches_a_normalisation_by_rank(
    ranks, course_of, small_corpus, tmp_path, strategy
):
    options = [f"distributed.strategy={strategy}"]
    broken = ranks(2)(broken_row, str(tmp_path), "lmu", small_corpus, options)[0]
    found = distance(course_of("lmu", 1), broken)
    assert not found.small
    assert found.norm > 10 * TOLERANCE
