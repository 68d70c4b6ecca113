"""benchmarks/speed.py, which needs a GPU for all but its refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "speed.py"


def refusal(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    return done.stderr.splitlines()[-1]


def test_an_unknown_row_is_refused_by_name():
    assert "no row is named samll; they are gpt2, llama-1b" in refusal("samll")


@pytest.mark.skipif(torch.cuda.is_available(), reason="starts every row")
def test_without_a_gpu_every_row_is_refused():
    assert "finds no NVIDIA GPU" in refusal()
