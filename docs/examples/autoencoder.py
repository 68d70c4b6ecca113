"""An autoencoder of scikit-learn's digits: the smallest task there can be."""

import torch
import torch.nn.functional as F
from pydantic import BaseModel
from torch import nn

import muster
from muster.data.images.source import read_digits


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + F.gelu(self.linear(self.norm(x)))


class Autoencoder(muster.Task):
    class Options(BaseModel):
        width: int = 64
        depth: int = 2
        code: int = 8

    def build_model(self):
        o = self.options
        stack = [nn.Sequential(*(Layer(o.width) for _ in range(o.depth))) for _ in range(2)]
        encoder = [nn.Linear(64, o.width), stack[0], nn.Linear(o.width, o.code)]
        return nn.Sequential(*encoder, nn.Linear(o.code, o.width), stack[1], nn.Linear(o.width, 64))

    def source(self, split):
        if split == "validation":
            return None
        return muster.ListSource(read_digits(split).array.reshape(-1, 64))

    def collate(self, samples, epoch, longest=None):
        pixels = torch.stack([torch.from_numpy(sample) for sample in samples]).float() / 255
        return muster.Batch(tensors={"pixels": pixels}, units=pixels.numel())

    def loss(self, output, batch):
        return F.mse_loss(output.float(), batch["pixels"], reduction="sum")
