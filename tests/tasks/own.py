"""A user's own task, small enough that its training costs nothing."""

from __future__ import annotations

from pathlib import Path

FILE = """
import torch
from pydantic import BaseModel, Field
from torch import nn

import muster


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(x).tanh()


class Net(nn.Sequential):
    pass


class Fit(muster.Task):
    class Options(BaseModel):
        depth: int = Field(2, gt=0)
        noise: float = 0.1

    def build_model(self):
        return Net(*(Block() for _ in range(self.options.depth)), nn.Linear(4, 1))

    def source(self, split):
        if split == "validation":
            return None
        points = torch.randn(40, 4, generator=torch.Generator().manual_seed(len(split)))
        return muster.ListSource(list(points))

    def collate(self, samples, epoch, longest=None):
        x = torch.stack(samples)
        return muster.Batch(tensors={"x": x, "y": x.sum(1, keepdim=True)}, units=len(x))

    def loss(self, output, batch):
        return (output.float() - batch["y"]).square().sum()
"""
RECIPE = """
name: fit
task: fit.py:Fit
task_options: {depth: 3}
training: {steps: 4, global_batch_size: 8, precision: fp32, lr: 1.0e-2, warmup_steps: 0}
checkpoint: {every_steps: 2}
evaluation: {every_steps: null}
logging: {to: []}
"""


def write(folder: Path, *changes: tuple[str, str]) -> Path:
    """The recipe's file, with its task beside it, in which each first text becomes the second."""
    text = FILE
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    (folder / "fit.py").write_text(text)
    (folder / "fit.yaml").write_text(RECIPE)
    return folder / "fit.yaml"
