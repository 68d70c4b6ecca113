"""A real run of two ranks, read while it trains: one rank becomes slow, and is named."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import processes
from muster import run_directory
from muster.page.build import document
from muster.page.document import Document, Finding
from muster.page.read import RunFiles
from processes import python_path
from tiny import LONG

SLOWED = """
import os
if os.environ.get("RANK") == "1":
    import time
    import torch
    real = torch.optim.AdamW.step
    def step(*args, **kwargs):
        if os.path.exists({file!r}):
            time.sleep(0.6)
        return real(*args, **kwargs)
    torch.optim.AdamW.step = step
"""
NAMED_S = 10.0


@pytest.fixture(scope="module")
def folder(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a run of two ranks goes on; a file `slow` slows the second."""
    found = tmp_path_factory.mktemp("real")
    (found / "sitecustomize.py").write_text(SLOWED.format(file=str(found / "slow")))
    words = ["train", recipe, LONG, "--gpus", "2", "--detach"]
    processes.muster(*words, folder=found, env=python_path(found))
    yield found
    run_directory.stop(run_directory.find("latest", found / "runs"), 0.0, now=True)


def until(files: RunFiles, holds: Callable[[Document], Any], limit_s: float) -> Document:
    end = time.monotonic() + limit_s
    while True:
        files.refresh()
        if holds(found := document(files)):
            return found
        assert time.monotonic() < end, found["findings"]
        time.sleep(0.2)


def named_bad(found: Document) -> list[Finding]:
    return [one for one in found["findings"] if one["rank"] == 1 and one["level"] == "bad"]


@pytest.mark.serial
def test_a_rank_that_becomes_slow_is_named_within_ten_seconds(folder: Path) -> None:
    files = RunFiles(run_directory.find("latest", folder / "runs").path)
    before = until(files, lambda found: len(found["curves"]["step"]) >= 30, 90)
    assert not named_bad(before)  # on a busy machine a rank may be a little slow by itself
    (folder / "slow").touch()
    slowed = time.monotonic()
    found = until(files, named_bad, 3 * NAMED_S)
    assert time.monotonic() - slowed < NAMED_S
    (finding,) = named_bad(found)
    assert finding["text"].startswith("Rank 1 on ")
    assert "all wait for it" in finding["text"]
    assert found["ranks"]["rows"][1]["state"] == "slow"


@pytest.mark.serial
def test_the_document_of_a_run_that_trains_is_whole(folder: Path) -> None:
    files = RunFiles(run_directory.find("latest", folder / "runs").path)
    found = until(
        files, lambda now: all(r["utilisation"] is not None for r in now["ranks"]["rows"]), 90
    )
    run, heat = found["run"], found["heat"]
    assert (run["state"], run["world"], run["task"]) == ("running", 2, "causal-lm")
    assert run["eta_s"] is not None
    assert run["throughput"] is not None
    assert run["throughput"]["unit"] == "tokens/s"
    assert heat["ranks"] == [0, 1]
    assert len(heat["compute"][0]) == len(heat["step"]) - 1
    assert all(value is not None for value in heat["compute"][1][:5])
    times = found["curves"]["time"]
    assert times == sorted(times, key=lambda value: value or 0.0)
    assert abs((times[-1] or 0.0) - time.time()) < 60
    told = {row["name"]: row for row in found["told"]["environment"]}
    assert told["OMP_NUM_THREADS"]["reason"]
    assert told["OMP_NUM_THREADS"]["by"] == "user"  # the tests set it
    json.dumps(found, allow_nan=False)
