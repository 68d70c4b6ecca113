"""What CPU ranks cannot show of law 1: compiled blocks and bf16, over NCCL."""

from __future__ import annotations

import pytest

from muster.checks.parity import ROWS, distance

pytestmark = pytest.mark.gpu
OPTIONS = {row.name: row.options for row in ROWS}
COMPILED = ("training.compile=true",)
BF16 = ("training.precision=bf16",)
# bf16 keeps 8 bits: 4e-3 of every value that is rounded. Sums of other shapes round differently.
BF16_LOSS, BF16_NORM = 2e-3, 2e-2


@pytest.mark.parametrize(
    ("strategy", "world", "model"),
    [
        ("ddp", 2, "gpt"),
        ("ddp", 2, "whisper"),
        ("fsdp", 2, "gpt"),
        ("fsdp", 4, "llama"),
        ("zero2", 2, "gpt-aligned"),
        ("tensor", 2, "gpt"),
        ("pipeline 1f1b", 2, "llama"),
    ],
)
def test_compiled_blocks_give_the_course_of_one_plain_process(
    course_of, record_property, strategy, world, model
):
    options = (*OPTIONS[strategy], *COMPILED)
    found = distance(course_of(model, 1), course_of(model, world, options))
    record_property("row", f"| {strategy}, compiled | {world} | {model} | 1 | {found}")
    assert found.small, found


@pytest.mark.parametrize(
    ("strategy", "world", "model"),
    [
        ("ddp", 2, "gpt"),
        ("ddp", 4, "lmu"),
        ("fsdp", 2, "whisper"),
        ("fsdp", 4, "llama"),
        ("zero2", 2, "gpt"),
        ("zero3", 2, "llama"),
        ("tensor", 2, "gpt"),
        ("pipeline 1f1b", 2, "gpt"),
        ("tensor × fsdp", 4, "llama"),
    ],
)
def test_bf16_stays_within_its_rounding(course_of, record_property, strategy, world, model):
    found = distance(
        course_of(model, 1, BF16), course_of(model, world, (*OPTIONS[strategy], *BF16))
    )
    record_property("row", f"| {strategy}, bf16 | {world} | {model} | 1 | {found}")
    assert found.loss < BF16_LOSS, found
    assert found.norm < BF16_NORM, found


@pytest.mark.parametrize(("strategy", "world"), [("ddp", 2), ("fsdp", 4)])
def test_batch_norm_is_shared_over_nccl(course_of, record_property, strategy, world):
    found = distance(course_of("lmu-norm", 1), course_of("lmu-norm", world, OPTIONS[strategy]))
    record_property("row", f"| {strategy}, SyncBatchNorm | {world} | lmu-norm | 1 | {found}")
    assert found.small, found
