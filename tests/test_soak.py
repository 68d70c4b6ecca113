"""What `tools/soak.py` says of a run: it grows, or it stays as it is."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from muster.run_directory import Run

TOOLS = Path(__file__).parents[1] / "tools"
sys.path.append(str(TOOLS))
import soak  # noqa: E402
import soak_samples  # noqa: E402
from soak_samples import MEASURES, Series, judge  # noqa: E402

MEMORY = MEASURES[0]


def series(per_second: float, lives: int = 3) -> Series:
    """Of several processes, each with a level of its own, and noise of 1 MiB."""
    noise, found = random.Random(0), Series()
    for life in range(lives):
        for second in range(0, 1200, 2):
            value = 300 + 20 * life + per_second * second + noise.gauss(0, 1)
            found.add(life, 1200 * life + second, value)
    return found


def test_a_leak_is_told_from_noise_and_from_processes_of_different_size():
    assert judge(MEMORY, series(0.0)).flat
    leak = judge(MEMORY, series(0.02))
    assert not leak.flat
    assert leak.growth == pytest.approx(0.02 * 1198, rel=0.05)
    assert leak.per_hour == pytest.approx(72, rel=0.05)


def once(value: float) -> Series:
    found = Series()
    found.add("run", 0.0, value)
    return found


@pytest.mark.parametrize("found", [Series(), once(300.0)], ids=["never", "once"])
def test_what_was_not_sampled_is_a_problem(found):
    verdict = judge(MEMORY, found)
    assert not verdict.flat
    assert "memory of a rank was sampled" in verdict.problem(alone=False)
    assert soak_samples.table("run", [verdict])[2].endswith("not sampled")


def test_a_measure_that_other_programs_change_counts_only_alone():
    wall = next(measure for measure in MEASURES if measure.alone)
    grown = judge(wall, series(0.2))
    assert grown.problem(alone=True) == "time per step grows"
    assert grown.problem(alone=False) == ""
    assert judge(MEMORY, series(0.02)).problem(alone=False) == "memory of a rank grows"
    assert judge(MEMORY, series(0.0)).problem(alone=True) == ""


def test_one_other_loss_and_one_missing_step_are_found(tmp_path):
    lines = [f'{{"step": {n}, "loss": {1 / n}, "grad_norm": 1.0}}\n' for n in range(1, 9)]
    for name, kept in (
        ("a", lines),
        ("b", [*lines[:5], lines[5].replace("0.16", "0.17"), *lines[6:]]),
        ("c", lines[1:]),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(kept))
    a, b, c = (Run(tmp_path / name) for name in "abc")
    assert soak.compare(a, a) == []
    assert soak.compare(a, b) == ["loss differs in 1 steps, first in step 6"]
    assert "steps are missing or repeated in metrics.jsonl" in soak.compare(c, a)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_minute_of_disturbances_changes_no_number(tmp_path):
    words = [
        sys.executable,
        str(TOOLS / "soak.py"),
        "0.02",
        "--folder",
        str(tmp_path),
        "--seed",
        "4",
    ]
    told = subprocess.run(words, capture_output=True, text=True)
    assert "PROBLEM: loss" not in told.stdout, told.stdout
    assert "all losses and gradient norms are the same numbers" in told.stdout, (
        told.stdout + told.stderr
    )
    assert soak_samples.count_files(tmp_path / "kept" / "soak") < 60
