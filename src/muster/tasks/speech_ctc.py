"""Speech recognition with connectionist temporal classification."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster import models
from muster.data.corpus import Split
from muster.data.loader import Batch, Inputs
from muster.data.speech.features import LogMel, apply_masks
from muster.data.speech.source import SpeechSample, SpeechSource, check_characters
from muster.data.speech.vocabulary import Vocabulary, build_vocabulary, symbol_kind
from muster.errors import RecipeError
from muster.evaluate.ctc_decode import greedy, prefix_beam
from muster.evaluate.ngram import NGram, build, read_arpa
from muster.models.gpu_kernels import for_gpu
from muster.recipe.schema import Recipe
from muster.tasks.base import Counts, Example, Score, Task
from muster.tasks.ctc import ctc_targets, frames_needed, summed_ctc_loss
from muster.tasks.speech import (
    augmentation,
    pad_waves,
    silent_sample,
    speech_files,
    speech_source,
    wer_remarks,
    word_rates,
    word_score,
)

NGRAM_ORDER = 3
FRAME_MULTIPLE = 32


class SpeechCTC(Task):
    """Log-mel on the device, an acoustic model, CTC over characters or subwords."""

    def __init__(self, recipe: Recipe, assets: dict[str, Any] | None = None) -> None:
        self.recipe = recipe
        self.logmel = self._features()
        self._sources: dict[Split, SpeechSource | None] = {}
        if assets is not None:
            self.vocabulary = Vocabulary.from_json(assets["vocabulary"])
        else:
            self.vocabulary = self._new_vocabulary()
        self.language_model = self._language_model((assets or {}).get("ngram"))
        self.assets: dict[str, Any] = {"vocabulary": self.vocabulary.to_json()}
        if recipe.evaluation.ngram == "train" and self.language_model is not None:
            self.assets["ngram"] = self.language_model.to_json()

    def build_model(self) -> nn.Module:
        wanted = self.recipe.model
        try:
            return models.build(
                wanted.preset,
                vocab=self.vocabulary.size,
                shape=wanted.sizes,
                mels=self.recipe.data.mels,
                norm=wanted.norm,
                dropout=wanted.dropout,
            )
        except ValueError as error:
            raise RecipeError(f"model.preset: {error}") from None

    def source(self, split: Split) -> SpeechSource | None:
        if split not in self._sources:
            self._sources[split] = (
                self._usable(self._read(split), split) if speech_files(self.recipe, split) else None
            )
        return self._sources[split]

    def collate(
        self, samples: Sequence[SpeechSample], epoch: int | None, longest: float | None = None
    ) -> Batch:
        lengths = [len(s.samples) for s in samples]
        waves = pad_waves(samples, self._padded(max(lengths), longest))
        targets = [[] if s.broken else self._encode(s.text) for s in samples]
        symbols, counts = ctc_targets(targets)
        tensors = {
            "samples": waves,
            "lengths": torch.tensor(lengths),
            "targets": symbols,
            "target_lengths": counts,
        }
        return Batch(
            ids=[s.id for s in samples],
            tensors=tensors | augmentation(self.recipe, samples, epoch, self.mels),
            units=sum(len(target) for target in targets),
            filled=sum(lengths),
            cells=waves.numel(),
            amounts={"audio_s": sum(lengths) / self.recipe.data.sample_rate},
        )

    @property
    def mels(self) -> int:
        """Channels that SpecAugment masks."""
        return self.recipe.data.mels

    def prepare(self, batch: Batch) -> Batch:
        self.logmel.to(batch["samples"].device)
        warp = batch.tensors.get("warp")
        features, frames = self.logmel(batch["samples"], batch["lengths"], warp)
        if "bands" in batch.tensors:
            features = apply_masks(features, frames, batch["bands"], batch["stretches"])
        if for_gpu(features):  # few shapes: cuDNN benchmarks each one
            features = F.pad(features, (0, 0, 0, -features.shape[1] % FRAME_MULTIPLE))
        return batch.adding(features=features, frames=frames)

    def inputs(self, batch: Batch) -> Inputs:
        return Inputs((batch["features"], batch["frames"]))

    def loss(self, output: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        logits, lengths = output
        targets = batch["targets"], batch["target_lengths"]
        return summed_ctc_loss(logits, lengths, targets, self.vocabulary.blank)

    def example(self) -> SpeechSample:
        return silent_sample(self.recipe, math.inf)

    def score(self, output: tuple[Tensor, Tensor], batch: Batch) -> Score:
        ends = batch["target_lengths"].cumsum(0).tolist()
        targets = batch["targets"].tolist()
        references = [
            self.vocabulary.decode(targets[start:end])
            for start, end in itertools.pairwise([0, *ends])
        ]
        return word_score(zip(batch.ids, references, self.decode(*output), strict=True))

    def remarks(self, scores: dict[str, float], worst: Sequence[Example]) -> list[str]:
        cure = "Train longer (training.steps), or with a lower training.lr"
        return wer_remarks(scores, worst, cure)

    def summarise(self, counts: Counts) -> dict[str, float]:
        return word_rates(counts)

    def decode(self, logits: Tensor, lengths: Tensor) -> list[str]:
        """Logits `[batch, time, vocab]` to text, the way `evaluation.decoder` says."""
        options = self.recipe.evaluation
        if options.decoder == "greedy":
            found = greedy(logits, lengths, self.vocabulary.blank)
            return [self.vocabulary.decode(ids) for ids in found]
        log_probs = F.log_softmax(logits.float(), dim=-1).cpu()
        texts = []
        for row, length in zip(log_probs, lengths.tolist(), strict=True):
            best = prefix_beam(
                row[:length],
                16 if options.beam_width == "auto" else options.beam_width,
                pieces=self.vocabulary.pieces,
                lm=self.language_model,
                lm_weight=options.ngram_weight,
                word_bonus=options.word_bonus,
                known_words=options.known_words,
                blank=self.vocabulary.blank,
            )
            texts.append(" ".join(self.vocabulary.decode(best[0][0]).split()))
        return texts

    def _features(self) -> Any:
        """Waveforms and lengths to what the model reads, and its lengths."""
        data = self.recipe.data
        return LogMel(data.sample_rate, data.mels, data.normalize)

    def _new_vocabulary(self) -> Vocabulary:
        models.check_preset(self.recipe.task, self.recipe.model.preset, self.recipe.model.sizes)
        return self._learn_vocabulary()

    def _learn_vocabulary(self) -> Vocabulary:
        wanted = self.recipe.data.tokenizer
        kind = symbol_kind(wanted.kind)
        texts = self._read("train").texts if kind == "subwords" else []
        return build_vocabulary(kind, wanted.characters, wanted.vocabulary_size, texts)

    def _padded(self, samples: int, longest: float | None) -> int | None:
        """Samples to pad a batch to; None: to its longest clip."""
        return None

    def _language_model(self, saved: dict[str, Any] | None) -> NGram | None:
        """`evaluation.ngram`: a file, or `train`: built from the training transcripts and saved in
        the checkpoint, so that inference needs no training data."""
        wanted = self.recipe.evaluation.ngram
        if wanted is None:
            return None
        if wanted != "train":
            return read_arpa(wanted)
        return NGram.from_json(saved) if saved else build(self._read("train").texts, NGRAM_ORDER)

    def _read(self, split: Split) -> SpeechSource:
        return speech_source(self.recipe, split, lowercase=True)

    def _usable(self, source: SpeechSource, split: Split) -> SpeechSource:
        """Check that transcripts can be encoded and, for training, fit into their clips' frames."""
        check_characters(source, self.vocabulary, self.recipe.data.unknown_characters == "drop")
        if split == "train":
            model_frames = self._frames_per_clip(source)
            needed = [frames_needed(self._encode(text)) for text in source.texts]
            fits = [0 < want <= have for want, have in zip(needed, model_frames, strict=True)]
            source.keep(
                fits, "the transcript has more symbols than the model has frames for the clip"
            )
        return source

    def _frames_per_clip(self, source: SpeechSource) -> list[int]:
        samples = torch.from_numpy(np.round(source.lengths * self.recipe.data.sample_rate)).long()
        with torch.device("meta"):
            model = self.build_model()
        return model.output_lengths(self.logmel.frames(samples)).tolist()  # type: ignore[operator]

    def _encode(self, text: str) -> list[int]:
        return self.vocabulary.encode(text, drop=self.recipe.data.unknown_characters == "drop")
