"""The smallest training that is whole: a language model of 1M parameters on a page of text.

For tests of how ranks start, fail, stop and go on, which do not care what is trained. The learning
rate is constant, so a run's first steps do not depend on how many follow, and low, so that sums in
another order do not grow into other losses.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from muster.observe.results import read_lines
from muster.run_directory import Run
from processes import python_path

RECIPE = """
name: tiny
task: causal-lm
model: {{preset: gpt2-micro}}
data: {{train: {data}, sequence_length: 16}}
training: {{steps: {steps}, global_batch_size: 8, lr: 1.0e-4, precision: fp32,
  schedule: constant, warmup_steps: 0}}
checkpoint: {{every_steps: 6}}
evaluation: {{every_steps: null, final: false}}
logging: {{to: [], report: false}}
"""
SLOW = """
import sys
if "muster.worker" in sys.orig_argv:
    import time
    import torch
    real = torch.optim.AdamW.step
    def step(*args, **kwargs):
        time.sleep({seconds})
        return real(*args, **kwargs)
    torch.optim.AdamW.step = step
"""
HELD = """
import os
if "RANK" in os.environ:
    import time
    import torch
    real = torch.optim.AdamW.step
    def step(self, *args, **kwargs):
        taken = max((int(state["step"]) for state in self.state.values() if "step" in state), default=0)
        while taken >= {steps} and not os.path.exists({go!r}):
            time.sleep(0.02)
        return real(self, *args, **kwargs)
    torch.optim.AdamW.step = step
"""
STEPS = 12
LONG = "training.steps=100000"  # for runs that are to be ended


def write(folder: Path) -> Path:
    """The recipe's file; the text lies beside it."""
    (folder / "train.txt").write_text(Path(str(textwrap.__file__)).read_text())
    path = folder / "tiny.yaml"
    path.write_text(RECIPE.format(data=folder / "train.txt", steps=STEPS))
    return path


def slow_steps(folder: Path, seconds: float = 0.15) -> dict[str, str]:
    """Variables under which every optimizer step takes so long: time to interrupt a short run."""
    (folder / "sitecustomize.py").write_text(SLOW.format(seconds=seconds))
    return python_path(folder)


def held_after(steps: int, folder: Path, go: Path) -> dict[str, str]:
    """Variables under which ranks wait after so many optimizer steps until there is a file `go`: a short
    run that cannot end before it is interrupted. Steps before a checkpoint count."""
    (folder / "sitecustomize.py").write_text(HELD.format(steps=steps, go=str(go)))
    return python_path(folder)


def losses(run: Run | Path) -> list[float]:
    path = run.path if isinstance(run, Run) else run
    return [line["loss"] for line in read_lines(path / "metrics.jsonl")]
