"""A CTC loss beside the decoder's is the same sum under every layout."""

from __future__ import annotations

import pytest

from muster.checks.parity import distance

CTC = ("training.ctc_weight=0.4",)


@pytest.mark.parametrize(
    ("strategy", "world", "accumulation"),
    [
        ("ddp", 2, 1),
        ("fsdp", 2, 4),
        pytest.param("ddp", 4, 4, marks=pytest.mark.full),
        pytest.param("zero1", 2, 4, marks=pytest.mark.full),
        pytest.param("zero3", 2, 1, marks=pytest.mark.full),
    ],
)
def test_ranks_and_accumulation_give_the_course_of_one_process(
    course_of, strategy, world, accumulation
):
    layout = (*CTC, f"distributed.strategy={strategy}")
    found = distance(
        course_of("whisper", 1, CTC), course_of("whisper", world, layout, accumulation)
    )
    assert found.small, found


def test_the_ctc_loss_of_these_rows_counts(course_of):
    plain, joint = course_of("whisper", 1), course_of("whisper", 1, CTC)
    assert set(joint.weights) - set(plain.weights) == {"ctc_head.weight", "ctc_head.bias"}
    assert joint.losses[0] != pytest.approx(plain.losses[0], rel=0.01)
