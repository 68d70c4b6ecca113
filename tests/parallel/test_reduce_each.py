"""FSDP may sum the gradients of every micro-batch at once: more messages, less memory, same maths."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from muster.planner.dtensor_recorder import DTensorRecorder
from muster.planner.simulate import recording, step, track_static
from muster.planner.trace import Trace
from parallel.models import GPT, course, make_batch, make_engine, make_functions, micro_batches

ROWS = 8
COUNT = 4
WIDE = dataclasses.replace(GPT, width=64, hidden=256)


def options(each: bool) -> dict[str, Any]:
    return {"strategy": "fsdp", "fsdp": {"reduce_each_micro_batch": each}}


def norms_and_losses(mesh, each: bool) -> tuple[list[float], list[float]]:
    engine = make_engine(mesh, GPT, options(each))
    batch = make_batch(GPT, ROWS)
    pieces = micro_batches(mesh, options(each), batch, COUNT)
    norms = course(engine, pieces, batch.units)
    return norms, [float(loss) for loss in engine.accumulate(pieces, make_functions(batch.units))]


def test_the_course_is_the_same(ranks):
    for (norms, losses), (others, their) in zip(
        ranks(2)(norms_and_losses, True), ranks(2)(norms_and_losses, False), strict=True
    ):
        assert norms == pytest.approx(others, rel=1e-5)
        assert losses == pytest.approx(their, rel=1e-5)


def highest(mesh, each: bool) -> int:
    engine: Any = make_engine(mesh, WIDE, options(each))
    pieces = [make_batch(WIDE, 1)] * COUNT
    recorder = DTensorRecorder()
    track_static(engine, recorder)
    with recorder, recording(recorder, engine):
        for _ in range(2):
            engine.zero_grad()
            recorder.trace = Trace()
            step(engine, pieces, make_functions(64), recorder)
    return recorder.trace.peak


@pytest.mark.full
def test_whole_gradients_are_not_kept(ranks):
    """What falls away is all that a rank does not own of the gradients, but for a block or two."""
    kept, summed = ranks(2)(highest, False)[0], ranks(2)(highest, True)[0]
    whole = 4 * (WIDE.layers * (4 * 64 * 64 + 2 * 64 * 256))
    assert kept - summed > 0.2 * whole
