"""Rank 1 goes astray in NCCL's collectives: each run ends in time, with the rank and the line."""

from __future__ import annotations

import pytest

from muster.diagnose.hang import analyse
from muster.observe.heartbeat import GRACE_S
from muster.run_directory import Run
from spoilt import spoil

STALL_S = 20.0  # four runs start at once on one GPU
LIMIT_S = STALL_S + GRACE_S + 40.0
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def spoilt(recipe, tmp_path_factory) -> dict[str, tuple[Run, float]]:
    """FSDP calls reduce_scatter_tensor in the backward pass, once for each block."""
    root = tmp_path_factory.mktemp("spoilt")
    words = ("distributed.strategy=fsdp", f"distributed.stall_s={STALL_S}")
    return spoil(root, recipe, "reduce_scatter_tensor", "True", *words)


@pytest.mark.parametrize(
    ("how", "state"), [("sleep", "stuck"), ("skip", "elsewhere"), ("SIGSTOP", "stopped")]
)
def test_the_rank_and_its_collective_are_named(spoilt, how, state):
    run, lived = spoilt[how]
    assert lived < LIMIT_S, f"{how}: {lived:.0f} s"
    found = analyse(run.path, 2)
    assert found is not None, [p.name for p in (run.path / "ranks").iterdir()]
    assert (found.rank, found.state) == (1, state), found
    assert "reduce_scatter" in found.words, found.words
    assert run.info()["failure"]["what"] == found.words
    if how == "sleep":  # FSDP reduces in autograd's thread; the line is that of the main thread
        assert "backward()" in (found.line or "")


def test_a_killed_rank_is_named(spoilt):
    failure = spoilt["SIGKILL"][0].info()["failure"]
    assert (failure["rank"], failure["signal"]) == (1, "SIGKILL")
