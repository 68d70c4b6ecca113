"""Language models: predict every next token."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from muster import models
from muster.data import corpus
from muster.data.corpus import Split
from muster.data.loader import IGNORE, Batch, Inputs
from muster.data.text import tokenizers as tokens
from muster.data.text.packing import PackedSample, PackedSource
from muster.data.text.tokenizers import Tokenizer
from muster.errors import RecipeError
from muster.models.configs import DecoderConfig, RopeScaling
from muster.models.decoder import Decoder, Part, initial_std
from muster.models.weights import FreshWeights, Weights
from muster.recipe.schema import Recipe
from muster.tasks.base import AnyRank, Counts, Lengths, Score
from muster.tasks.likelihood import negative_log_likelihood


class CausalLM:
    """A decoder over packed sequences; GPT-2 and Llama shapes, fresh or pretrained."""

    def __init__(self, recipe: Recipe, assets: dict[str, Any] | None = None) -> None:
        self.recipe = recipe
        self._folder: Path | None = None
        self._sources: dict[Split, PackedSource | None] = {}
        self.family: str | None = None  # model_type of the pretrained folder
        if assets is not None:
            self.tokenizer = Tokenizer.from_json(assets["tokenizer"])
            self.config, self.family = _config_from_json(assets["config"]), assets["family"]
        else:
            self._folder = _pretrained(recipe)
            wanted = recipe.data.tokenizer
            self.tokenizer = tokens.choose(wanted.kind, wanted.path, self._folder)
            self.config = self._configure()
        self._check()
        self.assets = {
            "tokenizer": self.tokenizer.to_json(),
            "config": dataclasses.asdict(self.config),
            "family": self.family,
        }

    def build_model(self) -> nn.Module:
        return self._adapted(Decoder(self.config))

    def build_part(self, start: int, stop: int) -> nn.Module:
        return self._adapted(Decoder(self.config, Part(start, stop, self.config.layers)))

    def weights(self) -> Weights:
        base: Weights = FreshWeights(self.recipe.seed, lambda name: initial_std(self.config, name))
        if self.recipe.model.pretrained:
            from muster.models.huggingface.folder import FolderWeights

            self._folder = self._folder or _pretrained(self.recipe)
            assert self._folder is not None
            base = FolderWeights(self._folder, self.config)
        if self.recipe.model.lora:
            from muster.models.lora import AdapterWeights

            base = AdapterWeights(base, self.recipe.seed)
        return base

    def source(self, split: Split) -> PackedSource | None:
        if split not in self._sources:
            files = self._files(split)
            self._sources[split] = self._pack(files, split) if files else None
        return self._sources[split]

    def collate(
        self, samples: Sequence[PackedSample], epoch: int | None, longest: float | None = None
    ) -> Batch:
        shape = (len(samples), self.recipe.data.sequence_length)
        inputs = np.full(shape, self.tokenizer.end)
        targets = np.full(shape, IGNORE)
        documents, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for row, sample in enumerate(samples):
            time = len(sample.tokens) - 1
            inputs[row, :time], targets[row, :time] = sample.tokens[:-1], sample.tokens[1:]
            documents[row, :time], positions[row, :time] = sample.documents, sample.positions
        arrays = {"tokens": inputs, "targets": targets}
        if self.recipe.data.isolate_documents:
            arrays |= {"positions": positions, "documents": documents}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        units = sum(len(sample.tokens) - 1 for sample in samples)
        return Batch(
            ids=[sample.id for sample in samples],
            tensors=tensors | {"bytes": torch.tensor([sample.bytes for sample in samples])},
            units=units,
            filled=units,
            cells=inputs.size,
            amounts={"tokens": float(units)},
        )

    def windows(self, lengths: Lengths, *, training: bool) -> None:
        return None

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def inputs(self, batch: Batch) -> Inputs:
        names = ("positions", "documents") if self.recipe.data.isolate_documents else ()
        return Inputs((batch["tokens"],), {name: batch[name] for name in names})

    def eval_inputs(self, batch: Batch, any_rank: AnyRank) -> Inputs:
        return self.inputs(batch)

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return negative_log_likelihood(output, batch["targets"], self.config.vocab, "sum")

    def score(self, output: Tensor, batch: Batch) -> Score:
        vocab = self.config.vocab
        nll = negative_log_likelihood(output, batch["targets"], vocab, "none").double().sum()
        written = batch["bytes"].sum()
        return Score({"nll": float(nll), "tokens": float(batch.units), "bytes": float(written)})

    def summarise(self, counts: Counts) -> dict[str, float]:
        """`loss` in nats per token. Bits per byte compare models with different tokenizers."""
        loss = counts["nll"] / counts["tokens"]
        return {
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": counts["nll"] / math.log(2) / counts["bytes"],
            "loss": loss,
            "tokens": counts["tokens"],
            "bytes": counts["bytes"],
        }

    def _configure(self) -> DecoderConfig:
        wanted = self.recipe.model
        if self._folder is not None:
            from muster.models.huggingface import folder as huggingface

            self.family = huggingface.read_family(self._folder)
            config = huggingface.read_config(self._folder)
            if wanted.vocab_size not in (None, config.vocab):
                raise RecipeError(
                    f"model.vocab_size: {wanted.vocab_size}, but {wanted.pretrained} has "
                    f"{config.vocab} rows; set it to null"
                )
            return dataclasses.replace(config, dropout=wanted.dropout)
        vocab = wanted.vocab_size or self.tokenizer.size
        models.check_preset(self.recipe.task, wanted.preset)
        found = models.configure(wanted.preset, vocab=vocab, dropout=wanted.dropout)
        assert isinstance(found, DecoderConfig)
        return found

    def _check(self) -> None:
        tokens.check_rows(self.tokenizer, self.config.vocab)
        length = self.recipe.data.sequence_length
        if length > self.config.positions:
            name = self.recipe.model.pretrained or self.recipe.model.preset
            raise RecipeError(
                f"data.sequence_length: {length} is more than the {self.config.positions} positions "
                f"of {name}; set it to {self.config.positions} or less"
            )

    def _adapted(self, model: Decoder) -> nn.Module:
        if (lora := self.recipe.model.lora) is not None:
            from muster.models.lora import attach

            attach(model, **lora.model_dump())
        return model

    def _pack(self, files: list[Path], split: Split) -> PackedSource:
        return PackedSource(
            files,
            self.tokenizer,
            self.recipe.data.sequence_length,
            whole=split == "train",
            text_column=self.recipe.data.text_column,
            max_bad_fraction=self.recipe.data.max_bad_fraction,
        )

    def _files(self, split: Split) -> list[Path]:
        data = self.recipe.data
        return corpus.split_files(
            data.train, data.validation, data.test, split, data.max_parquet_files, "text"
        )


def _pretrained(recipe: Recipe) -> Path | None:
    if recipe.model.pretrained is None:
        return None
    from muster.models.huggingface import folder as huggingface

    return huggingface.locate(recipe.model.pretrained)


def _config_from_json(saved: dict[str, Any]) -> DecoderConfig:
    scaling = saved["rope_scaling"]
    return DecoderConfig(**{**saved, "rope_scaling": scaling and RopeScaling(*scaling)})
