"""Language models that learn to answer: chat rows, and loss on the replies alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from muster.data.corpus import Split
from muster.data.loader import IGNORE, Batch
from muster.data.text.chat import ChatSample, ChatSource, reply_ends
from muster.data.text.chat_template import ChatTemplate, find_template
from muster.data.text.packing import document_starts
from muster.recipe.schema import Recipe
from muster.tasks.base import Counts, Score
from muster.tasks.causal_lm import CausalLM
from muster.tasks.likelihood import negative_log_likelihood


class ChatLM(CausalLM):
    """`causal-lm` over chat rows: the same models, other samples."""

    isolation_key = "data.pack_rows"

    def __init__(self, recipe: Recipe, assets: dict[str, Any] | None = None) -> None:
        super().__init__(recipe, assets)
        if assets is not None:
            self.template = ChatTemplate.from_json(assets["chat_template"])
        else:
            folder = self.tokenizer.folder(recipe.data.tokenizer.path, self._folder)
            self.template = find_template(
                recipe.data.chat_template, folder, self.tokenizer.end_text
            )
        self.assets["chat_template"] = self.template.to_json()

    @property
    def ends(self) -> frozenset[int]:
        return super().ends | reply_ends(self.tokenizer, self.template)

    @property
    def isolates(self) -> bool:
        return self.recipe.data.pack_rows

    def collate(
        self, samples: Sequence[Any], epoch: int | None, longest: float | None = None
    ) -> Batch:
        """Padded to `data.sequence_length`; what pads is a document of its own."""
        shape = (len(samples), self.recipe.data.sequence_length)
        inputs, targets = np.full(shape, self.tokenizer.end), np.full(shape, IGNORE)
        documents, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for row, sample in enumerate(samples):
            time = len(sample.inputs)
            inputs[row, :time], targets[row, :time] = sample.inputs, sample.targets
            documents[row, :time], positions[row, :time] = sample.documents, sample.positions
            documents[row, time:] = sample.documents[-1] + 1
        arrays = {"tokens": inputs, "targets": targets}
        if self.isolates:
            starts = document_starts(documents, max(sample.room for sample in samples))
            arrays |= {"positions": positions, "documents": documents, "starts": starts}
        filled = sum(len(sample.inputs) for sample in samples)
        return Batch(
            ids=[sample.id for sample in samples],
            tensors={name: torch.from_numpy(array) for name, array in arrays.items()},
            units=int((targets != IGNORE).sum()),
            filled=filled,
            cells=inputs.size,
            amounts={"tokens": float(filled)},
        )

    def score(self, output: Tensor, batch: Batch) -> Score:
        vocab = self.config.vocab
        nll = negative_log_likelihood(output, batch["targets"], vocab, "none").double().sum()
        tokens = (batch["targets"] != IGNORE).sum()
        return Score({"nll": float(nll), "tokens": float(tokens)})

    def summarise(self, counts: Counts) -> dict[str, float]:
        """`loss` in nats per token of a reply."""
        loss = counts["nll"] / counts["tokens"]
        perplexity = math.exp(min(loss, 700.0))
        return {"perplexity": perplexity, "loss": loss, "tokens": counts["tokens"]}

    def example(self) -> Any:
        row = np.zeros(self.recipe.data.sequence_length, np.int64)
        return ChatSample(0, row, row, row, row)

    def _open(self, files: list[Path], split: Split) -> ChatSource:
        data = self.recipe.data
        return ChatSource(
            files,
            self.tokenizer,
            self.template,
            data.sequence_length,
            pack=data.pack_rows,
            long_rows=data.long_texts,
            max_bad_fraction=data.max_bad_fraction,
        )
