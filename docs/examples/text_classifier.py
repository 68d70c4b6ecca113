"""Which module of Python's standard library is a line of code from? A BERT of random weights learns it."""

from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import BaseModel
from torch import nn
from transformers import BertConfig, BertModel

import muster

MODULES = ("argparse", "datetime", "tarfile", "typing")
LONGEST = 64  # bytes of a line; longer ones are cut


class Classifier(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.bert = BertModel(config)
        self.head = nn.Linear(config.hidden_size, len(MODULES))

    def forward(self, tokens, mask):
        return self.head(self.bert(tokens, attention_mask=mask).pooler_output)


class TextClassifier(muster.Task):
    class Options(BaseModel):
        layers: int = 2
        width: int = 64
        heads: int = 2

    def build_model(self):
        config = BertConfig(
            vocab_size=257,  # bytes, and 256 for padding
            hidden_size=self.options.width,
            num_hidden_layers=self.options.layers,
            num_attention_heads=self.options.heads,
            intermediate_size=4 * self.options.width,
            max_position_embeddings=LONGEST,
            hidden_dropout_prob=0.0,  # dropout masks would follow the rank
            attention_probs_dropout_prob=0.0,
            pad_token_id=256,
        )
        return Classifier(config)

    def source(self, split):
        lines = [
            (line.encode()[:LONGEST], label)
            for label, name in enumerate(MODULES)
            for line in Path(find_spec(name).origin).read_text().splitlines()
            if len(line.strip()) > 20
        ]
        parts = {"train": [], "validation": [], "test": []}
        for number, line in enumerate(lines):
            parts["test" if number % 10 == 0 else "train"].append(line)
        samples = parts[split]
        return muster.ListSource(samples, [len(text) for text, _ in samples]) if samples else None

    def collate(self, samples, epoch, longest=None):
        tokens = torch.full((len(samples), max(len(text) for text, _ in samples)), 256)
        for row, (text, _) in zip(tokens, samples, strict=True):
            row[: len(text)] = torch.tensor(list(text))
        mask = (tokens < 256).long()
        labels = torch.tensor([label for _, label in samples])
        return muster.Batch(
            tensors={"tokens": tokens, "mask": mask, "labels": labels},
            units=len(samples),
            filled=int(mask.sum()),
            cells=mask.numel(),
        )

    def inputs(self, batch):
        return muster.Inputs((batch["tokens"], batch["mask"]))

    def loss(self, output, batch):
        return F.cross_entropy(output.float(), batch["labels"], reduction="sum")

    def score(self, output, batch):
        right = (output.argmax(-1) == batch["labels"]).sum()
        nll = self.loss(output, batch)
        return muster.Score({"accuracy": float(right), "loss": float(nll), "units": batch.units})
