"""Real runs in which rank 1 goes astray: each ends in time, with the rank, the collective, the line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from muster.diagnose.hang import Hang, analyse
from muster.observe.heartbeat import GRACE_S, STALLED
from muster.run_directory import Run
from spoilt import spoil

STALL_S = 10.0  # a healthy first step must fit in
LIMIT_S = STALL_S + GRACE_S + 25.0  # 25: the agent's patience, and a busy machine
STEP_SUM = "args[0].ndim == 0 and args[0].dtype == torch.float64"  # the loss of a step
pytestmark = pytest.mark.timeout(420)


@pytest.fixture(scope="module")
def spoilt(recipe, tmp_path_factory) -> dict[str, tuple[Run, float]]:
    root = tmp_path_factory.mktemp("spoilt")
    return spoil(root, recipe, "all_reduce", STEP_SUM, f"distributed.stall_s={STALL_S}")


def hang(spoilt: dict[str, tuple[Run, float]], how: str) -> Hang:
    run, lived = spoilt[how]
    assert lived < LIMIT_S, f"{how}: {lived:.0f} s"
    assert run.state() == "failed"
    found = analyse(run.path, 2)
    assert found is not None, [p.name for p in (run.path / "ranks").iterdir()]
    assert found.rank == 1, found
    assert found.phase == "optimizer step"
    return found


def failure_of(spoilt: dict[str, tuple[Run, float]], how: str) -> dict[str, Any]:
    return dict(spoilt[how][0].info()["failure"])


def test_a_rank_that_sleeps_is_named_with_its_line(spoilt):
    found = hang(spoilt, "sleep")
    assert found.state == "stuck"
    assert "in all_reduce: time.sleep(600), from " in (found.line or "")
    assert "training/loop.py" in _stack(spoilt["sleep"][0], 1)
    assert "all_reduce number" in (found.collective or "")
    failure = failure_of(spoilt, "sleep")
    assert (failure["rank"], failure["exit_code"]) == (1, STALLED)
    assert failure["what"] == found.words


def test_a_rank_that_skips_a_collective_is_named_with_what_it_called(spoilt):
    run, lived = spoilt["skip"]
    assert lived < LIMIT_S
    found = analyse(run.path, 2)
    assert found is not None
    assert (found.rank, found.state) == (1, "mismatch")
    assert "all_reduce number" in (found.collective or "")
    assert "mesh.py" in found.words  # where rank 0 called what rank 1 skipped
    assert failure_of(spoilt, "skip")["what"] == found.words


def test_a_rank_that_is_stopped_is_named(spoilt):
    found = hang(spoilt, "SIGSTOP")
    assert found.state == "stopped"
    assert "all_reduce number" in (found.collective or "")
    assert failure_of(spoilt, "SIGSTOP")["rank"] == 1


def test_a_rank_that_is_killed_is_named(spoilt):
    assert failure_of(spoilt, "SIGKILL")["rank"] == 1
    assert failure_of(spoilt, "SIGKILL")["signal"] == "SIGKILL"


def _stack(run: Run, rank: int) -> str:
    report = json.loads((run.path / "ranks" / f"{rank}.stall.json").read_text())
    return " ".join(line["file"] for line in report["lines"])
