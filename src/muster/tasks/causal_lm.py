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
from muster.data.loader import IGNORE, Batch, Inputs, Source
from muster.data.mixture import MixedSource
from muster.data.text import tokenizers as tokens
from muster.data.text.packing import PackedSample, PackedSource, document_starts
from muster.data.text.tokenizers import Tokenizer
from muster.errors import CheckpointError, RecipeError
from muster.models.configs import DecoderConfig, RopeScaling
from muster.models.decoder import INITIAL_STD, Decoder, Part, initial_std
from muster.models.huggingface.generation import Generation, read_generation
from muster.models.huggingface.transformers_config import TransformersConfig
from muster.models.weights import FreshWeights, Weights
from muster.reading.files import expanded
from muster.reading.text import in_one_line
from muster.recipe.schema import Recipe
from muster.recipe.shape import check_length
from muster.tasks.base import Counts, Score, Task
from muster.tasks.likelihood import negative_log_likelihood


class CausalLM(Task):
    """A decoder over packed sequences, fresh or pretrained: GPT-2 and Llama shapes, or one that
    transformers builds."""

    isolation_key = "data.isolate_documents"  # which key asks for `isolates`

    def __init__(self, recipe: Recipe, assets: dict[str, Any] | None = None) -> None:
        self.recipe = recipe
        self._folder: Path | None = None
        self._sources: dict[Split, Source | None] = {}
        self.family: str | None = None  # model_type of the pretrained folder
        if assets is not None:
            self.tokenizer = Tokenizer.from_json(assets["tokenizer"])
            trusted = recipe.model.trust_remote_code
            self.config = _config_from_json(assets["config"], trust_remote_code=trusted)
            self.family = assets["family"]
            self._std = assets.get("initial_std", INITIAL_STD)
            known = assets.get("generation")  # which older checkpoints lack
            self.generation = Generation.from_json(known) if known else Generation()
        else:
            self._folder = _pretrained(recipe)
            wanted = recipe.data.tokenizer
            self.tokenizer = tokens.choose(wanted.kind, wanted.path, self._folder)
            self.config = self._configure()
            self._std = self._initial_std()
            self.generation = read_generation(self._folder) if self._folder else Generation()
        self._check()
        self.assets = {
            "tokenizer": self.tokenizer.to_json(),
            "config": dataclasses.asdict(self.config),
            "family": self.family,
            "initial_std": self._std,
            "generation": self.generation.to_json(),
        }

    def build_model(self) -> nn.Module:
        if isinstance(self.config, DecoderConfig):
            return self._adapted(Decoder(self.config))
        from muster.models.huggingface.transformers_model import TransformersLM

        return self._adapted(TransformersLM(self.config))

    def build_part(self, start: int, stop: int) -> nn.Module:
        assert isinstance(self.config, DecoderConfig)  # no other has a pipeline plan
        return self._adapted(Decoder(self.config, Part(start, stop, self.config.layers)))

    def weights(self) -> Weights:
        base = self._base_weights()
        if self.recipe.model.lora:
            from muster.models.lora import AdapterWeights

            base = AdapterWeights(base, self.recipe.seed)
        return base

    def _base_weights(self) -> Weights:
        config = self.config
        if self.recipe.model.pretrained:
            from muster.models.huggingface.folder import folder_weights

            self._folder = self._folder or _pretrained(self.recipe)
            assert self._folder is not None
            return folder_weights(self._folder, config)
        if isinstance(config, DecoderConfig):
            return FreshWeights(self.recipe.seed, lambda name: initial_std(config, name, self._std))
        from muster.models.huggingface.transformers_weights import FreshTransformersWeights

        return FreshTransformersWeights(self.recipe.seed, config)

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a text: the tokenizer's, and those of the pretrained model."""
        return frozenset([self.tokenizer.end, *self.generation.ends])

    @property
    def isolates(self) -> bool:
        """Whether the documents of a sequence do not see each other."""
        return self.recipe.data.isolate_documents

    def source(self, split: Split) -> Source | None:
        if split not in self._sources:
            files = self._files(split)
            if split == "train" and self.recipe.data.weights:
                self._sources[split] = self._mixed()
            else:
                self._sources[split] = self._open(files, split) if files else None
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
        if self.isolates:
            starts = document_starts(documents, max(sample.room for sample in samples))
            arrays |= {"positions": positions, "documents": documents, "starts": starts}
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

    def inputs(self, batch: Batch) -> Inputs:
        names: tuple[str, ...] = ("positions",) if batch.part is not None else ()
        if self.isolates:
            names = ("positions", "documents")
            if isinstance(self.config, DecoderConfig):
                names += ("starts",)
        return Inputs((batch["tokens"],), {name: batch[name] for name in names})

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return negative_log_likelihood(output, batch["targets"], self.config.vocab, "sum")

    def score(self, output: Tensor, batch: Batch) -> Score:
        vocab = self.config.vocab
        nll = negative_log_likelihood(output, batch["targets"], vocab, "none").double().sum()
        tokens = (batch["targets"] != IGNORE).sum()
        written = 0 if batch.part else batch["bytes"].sum()  # counted with the first part
        return Score({"nll": float(nll), "tokens": float(tokens), "bytes": float(written)})

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

    def example(self) -> PackedSample:
        length = self.recipe.data.sequence_length
        row = np.zeros(length + 1, np.int64)
        return PackedSample(0, row, length, row[:-1], row[:-1])

    def _configure(self) -> DecoderConfig | TransformersConfig:
        wanted = self.recipe.model
        if self._folder is not None or wanted.config is not None:
            from muster.models.huggingface import folder as huggingface
            from muster.models.huggingface.locate import refuse_no_weights

            key = "model.pretrained" if self._folder else "model.config"
            if self._folder:
                refuse_no_weights(self._folder)
            where = self._folder or expanded(str(wanted.config))
            self.family, config = huggingface.read_any(
                where, key, wanted.dropout, trust_remote_code=wanted.trust_remote_code
            )
            if wanted.vocab_size not in (None, config.vocab):
                raise RecipeError(
                    f"model.vocab_size: {wanted.vocab_size}, but {wanted.title} has "
                    f"{config.vocab} rows; set it to null"
                )
            return config
        vocab = wanted.vocab_size or self.tokenizer.size
        models.check_preset(self.recipe.task, wanted.preset, wanted.sizes)
        found = models.configure(wanted.preset, wanted.sizes, vocab=vocab, dropout=wanted.dropout)
        assert isinstance(found, DecoderConfig)
        return found

    def _initial_std(self) -> float:
        if self.recipe.model.config is None:
            return INITIAL_STD
        from muster.models.huggingface.config import ConfigFile

        file = ConfigFile(expanded(self.recipe.model.config), None, key="model.config")
        return float(file.get("initializer_range", None) or INITIAL_STD)

    def _check(self) -> None:
        tokens.check_rows(self.tokenizer, self.config.vocab)
        length, model = self.recipe.data.sequence_length, self.recipe.model
        check_length(length, self.config.positions, model.title, pretrained=bool(model.pretrained))

        theirs = self.config if isinstance(self.config, TransformersConfig) else None
        if self.isolates and theirs and not theirs.isolates_documents():
            raise RecipeError(
                f"{self.isolation_key}: transformers' model of {theirs.family} cannot keep "
                "documents apart; set it to false"
            )

    def _adapted(self, model: nn.Module) -> nn.Module:
        if (lora := self.recipe.model.lora) is not None:
            from muster.models.lora import attach

            attach(model, **lora.model_dump())
        return model

    def _open(self, files: list[Path], split: Split) -> Source:
        return PackedSource(
            files,
            self.tokenizer,
            self.recipe.data.sequence_length,
            whole=split == "train",
            text_column=self.recipe.data.text_column,
            max_bad_fraction=self.recipe.data.max_bad_fraction,
            packing=self.recipe.data.sequence_packing if split == "train" else "fixed",
            seed=self.recipe.seed,
            isolated=self.isolates,
        )

    def _mixed(self) -> MixedSource:
        """Each corpus packed by itself: no sequence holds text of two."""
        data = self.recipe.data
        parts = corpus.train_files(data.sources, data.max_parquet_files, "text")
        return MixedSource([self._open(files, "train") for files in parts])

    def _files(self, split: Split) -> list[Path]:
        data = self.recipe.data
        return corpus.split_files(
            data.sources, data.validation, data.test, split, data.max_parquet_files, "text"
        )


def _pretrained(recipe: Recipe) -> Path | None:
    if recipe.model.pretrained is None:
        return None
    from muster.models.huggingface import folder as huggingface

    return huggingface.locate(recipe.model.pretrained)


def _check_numbers(saved: dict[str, Any]) -> None:
    """What a dataclass takes as it comes would end the first step, or silently mean another number."""
    for field in dataclasses.fields(DecoderConfig):
        if field.name not in saved or (field.name == "window" and saved["window"] is None):
            continue
        value, kind = saved[field.name], str(field.type).partition(" ")[0]
        if kind == "int":
            fits = type(value) is int and value >= 0
        elif kind == "float":
            fits = type(value) in (int, float) and math.isfinite(value)
        else:
            fits = kind != "bool" or isinstance(value, bool)
        if not fits:
            expected = {"int": "a whole number", "float": "a number", "bool": "true or false"}[kind]
            raise CheckpointError(
                f"assets.json: config.{field.name} is {in_one_line(value, 60)}, expected {expected}; copy the "
                "checkpoint again"
            )


def _config_from_json(
    saved: dict[str, Any], *, trust_remote_code: bool
) -> DecoderConfig | TransformersConfig:
    if "keys" in saved:
        code = saved["code"]
        if code is not None and not (trust_remote_code and Path(code).is_dir()):
            raise RecipeError(
                f"model.trust_remote_code: this checkpoint's model is Python code in {code}; that folder must "
                "be there, and the key true"
            )
        return TransformersConfig(**saved)
    scaling = saved["rope_scaling"]
    _check_numbers(saved)
    return DecoderConfig(**{**saved, "rope_scaling": scaling and RopeScaling(*scaling)})
