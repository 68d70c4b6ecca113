"""Speech recognition with Whisper: log-mel on the device, an encoder, a decoder that writes tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.data.corpus import Split
from muster.data.loader import IGNORE, Batch, Inputs
from muster.data.speech import windows
from muster.data.speech.audio import SAMPLE_RATE
from muster.data.speech.features import apply_masks
from muster.data.speech.source import SpeechSample, SpeechSource
from muster.data.speech.whisper_features import HOP, WhisperLogMel
from muster.data.speech.whisper_targets import pair
from muster.data.speech.whisper_text import WhisperTokens, timestamps_in_range, tokenizer_kind
from muster.errors import RecipeError
from muster.evaluate.normalise import make_normaliser, read_spelling
from muster.models.configs import WhisperConfig
from muster.models.gpu_kernels import for_gpu
from muster.models.huggingface import folder as huggingface
from muster.models.weights import Weights
from muster.models.whisper import folder as whisper_folder
from muster.models.whisper.folder import Generation
from muster.models.whisper.hybrid import HeadWeights, HybridWhisper
from muster.models.whisper.model import FreshWhisper, Whisper, WhisperPart
from muster.models.whisper.search import Search
from muster.reading.files import expanded
from muster.recipe.schema import Recipe
from muster.tasks import whisper_ctc
from muster.tasks.base import AnyRank, Counts, Example, Lengths, Score, Task
from muster.tasks.likelihood import negative_log_likelihood
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
from muster.tasks.whisper_recipe import config_for, longest_window, normaliser_for, refuse_misfits
from muster.workloads import Workload

BEAMS = 5
TOKEN_MULTIPLE = 32


class SpeechSeq2Seq(Task):
    """Whisper, pretrained or fresh, over clips padded to a window."""

    def __init__(self, recipe: Recipe, assets: dict[str, Any] | None = None) -> None:
        self.recipe, self.ctc_weight = recipe, recipe.training.ctc_weight
        self._sources: dict[Split, SpeechSource | None] = {}
        self._folder: Path | None = None
        if recipe.data.sample_rate != SAMPLE_RATE:
            raise RecipeError(
                f"data.sample_rate: Whisper needs {SAMPLE_RATE} Hz, not {recipe.data.sample_rate}; leave it "
                "out, and clips of other rates are resampled"
            )
        if assets is None:
            self._folder = _pretrained(recipe)
            self.config = config_for(recipe, self._folder)
            self.tokens = self._tokenize()
            self.generation = Generation(self.tokens.suppress, self.tokens.suppress_first)
            self.spelling: dict[str, str] | None = None
            if self._folder is not None:
                self.generation = whisper_folder.read_generation(self._folder)
                self.spelling = read_spelling(self._folder)
        else:
            self.tokens = WhisperTokens.from_json(assets["tokens"])
            self.config = WhisperConfig(**assets["config"])
            self.generation = Generation.from_json(assets["generation"])
            self.spelling = assets["spelling"]
            self.buckets = tuple(assets["buckets"])
        refuse_misfits(recipe, self.config, self.tokens, self.generation)
        data = recipe.data
        self.prompt = self.tokens.prompt(data.language, data.speech_task, data.timestamps)
        self.logmel = WhisperLogMel(self.config.mels)
        self.normalise = make_normaliser(normaliser_for(recipe, self.tokens), self.spelling)

    @property
    def assets(self) -> dict[str, Any]:  # type: ignore[override]
        return {
            "tokens": self.tokens.to_json(),
            "config": dataclasses.asdict(self.config),
            "generation": dataclasses.asdict(self.generation),
            "spelling": self.spelling,
            "buckets": list(self.buckets),
        }

    @cached_property
    def buckets(self) -> tuple[float, ...]:
        """Window lengths to choose from, in seconds, that minimize the padding of the training clips."""
        source = self.source("train")
        assert source is not None
        found = windows.choose_lengths(
            source.lengths, self.recipe.data.buckets, longest=self._longest
        )
        return tuple(sorted({*found, self._longest}))  # a clip in evaluation may be longer

    @property
    def facts(self) -> Workload:
        """The CTC loss waits for the GPU."""
        return dataclasses.replace(super().facts, captures=not self.ctc_weight)

    def build_model(self) -> nn.Module:
        frozen = self.recipe.model.freeze_encoder
        if self.ctc_weight:
            return HybridWhisper(self.config, self.tokens.end, frozen)
        model = Whisper(self.config, freeze_encoder=frozen)
        if (lora := self.recipe.model.lora) is not None:
            from muster.models.lora import attach

            attach(model, **lora.model_dump())
        return model

    def build_part(self, start: int, stop: int) -> nn.Module:
        return WhisperPart(self.config, start, stop)

    def weights(self) -> Weights:
        base: Weights = FreshWhisper(self.recipe.seed)
        if self.recipe.model.pretrained:
            self._folder = self._folder or _pretrained(self.recipe)
            assert self._folder is not None
            base = whisper_folder.WhisperWeights(self._folder, self.config)
        if self.ctc_weight:
            base = HeadWeights(base, self.recipe.seed)
        if self.recipe.model.lora:
            from muster.models.lora import AdapterWeights

            base = AdapterWeights(base, self.recipe.seed)
        return base

    def source(self, split: Split) -> SpeechSource | None:
        if split not in self._sources:
            found = self._read(split) if speech_files(self.recipe, split) else None
            if found is not None and self.recipe.data.timestamps:
                found.keep(
                    [timestamps_in_range(text) for text in found.texts], "a timestamp beyond 30 s"
                )
            if found is not None and split == "train":
                self._fit_texts(found)
                if self.ctc_weight:
                    whisper_ctc.keep_long_enough(found, self.tokens, self._max_text_tokens)
            self._sources[split] = found
        return self._sources[split]

    def windows(self, lengths: Lengths, *, training: bool) -> Lengths:
        """A clip in evaluation that is longer than a fixed window gets the encoder's maximum."""
        asked: float | str = self.recipe.data.window if training else self._scoring_window()
        choice = self.buckets if isinstance(asked, str) else (asked,)
        return windows.round_up(lengths, choice, self._longest)

    def collate(
        self, samples: Sequence[SpeechSample], epoch: int | None, longest: float | None = None
    ) -> Batch:
        lengths = [len(s.samples) for s in samples]
        if longest is None:
            longest = max(lengths) / SAMPLE_RATE
        training = epoch is not None
        window = float(self.windows(np.array([longest]), training=training)[0])
        waves = pad_waves(samples, round(window * SAMPLE_RATE))
        tokens, targets = pair(
            self.prompt,
            self.tokens.encode_all([s.text for s in samples], self.recipe.data.timestamps),
            self.tokens.end,
            self._max_text_tokens if training else None,
            [s.broken for s in samples],
        )
        tensors = {
            "samples": waves,
            "lengths": torch.tensor(lengths),
            "tokens": tokens,
            "targets": targets,
            **augmentation(self.recipe, samples, epoch, self.config.mels),
        }
        if self.ctc_weight:
            tensors |= whisper_ctc.target_tensors(targets, self._is_text)
        return Batch(
            ids=[s.id for s in samples],
            tensors=tensors,
            units=int((targets != IGNORE).sum()),
            filled=sum(lengths),
            cells=waves.numel(),
            amounts={"audio_s": sum(lengths) / SAMPLE_RATE},
        )

    def prepare(self, batch: Batch) -> Batch:
        samples, tensors = batch["samples"], batch.tensors
        self.logmel.to(samples.device)
        features = self.logmel(samples, tensors.get("warp"))
        if "bands" in tensors:
            frames = (batch["lengths"] / HOP).ceil()
            features = apply_masks(features, frames, tensors["bands"], tensors["stretches"])
        tokens, targets = batch["tokens"], batch["targets"]
        missing = min(
            -tokens.shape[1] % TOKEN_MULTIPLE, self.config.target_positions - tokens.shape[1]
        )
        if for_gpu(samples) and missing > 0:  # few shapes: fewer graphs to capture
            tokens = F.pad(tokens, (0, missing), value=self.tokens.end)
            targets = F.pad(targets, (0, missing), value=IGNORE)
        prepared = {"features": features, "tokens": tokens, "targets": targets}
        prepared |= whisper_ctc.taken(tensors)
        return dataclasses.replace(batch, tensors=prepared)  # without the waveforms

    def inputs(self, batch: Batch) -> Inputs:
        return Inputs((batch["features"],), {"tokens": batch["tokens"]})

    def eval_inputs(self, batch: Batch, any_rank: AnyRank) -> Inputs:
        return self.generation_inputs(batch["features"], any_rank)

    def generation_inputs(
        self, features: Tensor, any_rank: AnyRank = bool, timestamps: bool | None = None
    ) -> Inputs:
        """Inputs for decoding; `timestamps`: with timestamps, by default as trained."""
        options, data = self.recipe.evaluation, self.recipe.data
        prompt = self.prompt
        if timestamps is not None:
            prompt = self.tokens.prompt(data.language, data.speech_task, timestamps)
        else:
            timestamps = data.timestamps
        beams = BEAMS if options.beam_width == "auto" else options.beam_width
        search = Search(
            end=self.tokens.end,
            limit=min(options.max_tokens, self.config.target_positions - len(prompt)),
            beams=beams if options.decoder == "beam" else 1,
            suppress=self.generation.suppress,
            suppress_first=self.generation.suppress_first,
            ctc_weight=whisper_ctc.decoding_weight(self.recipe, timestamps=timestamps),
            first_timestamp=self.tokens.first_timestamp if timestamps else None,
            any_rank=any_rank,
        )
        rows = torch.tensor([prompt], device=features.device).expand(len(features), -1)
        return Inputs((features, rows, search))

    def loss(self, output: Any, batch: Batch) -> Tensor:
        smoothing, weight = self.recipe.training.label_smoothing, self.ctc_weight
        logits, ctc_logits = output if weight else (output, None)
        loss = negative_log_likelihood(
            logits, batch["targets"], self.config.vocab, "sum", smoothing
        )
        if ctc_logits is None:
            return loss
        return whisper_ctc.joint_loss(loss, ctc_logits, batch, weight, self.tokens.end)

    def example(self) -> SpeechSample:
        asked = self.recipe.data.window
        return silent_sample(self.recipe, asked if isinstance(asked, float) else 30.0)

    def score(self, output: Tensor, batch: Batch) -> Score:
        references = [
            self.tokens.decode([t for t in row if t != IGNORE]) for row in batch["targets"].tolist()
        ]
        rows = zip(batch.ids, references, self.decode(output), strict=True)
        return word_score((i, self.normalise(r), self.normalise(h)) for i, r, h in rows)

    def remarks(self, scores: dict[str, float], worst: Sequence[Example]) -> list[str]:
        return wer_remarks(scores, worst, self._wer_cure())

    def _wer_cure(self) -> str:
        options = self.recipe.evaluation
        if self.recipe.model.pretrained and self._scoring_window() != self._longest:
            return (
                f"These weights were pretrained on windows of {self._longest:g} s and are scored in "
                f"others (evaluation.window={options.window}), where they do not end: set "
                f"evaluation.window={self._longest:g}"
            )
        cure = "Train longer (training.steps), or on more data"
        if not self.recipe.model.pretrained and not self.recipe.training.ctc_weight:
            cure = "From scratch, training.ctc_weight=0.3 teaches the encoder to listen; else train longer"
        return (
            f"{cure}; until then a lower evaluation.max_tokens (now {options.max_tokens}) ends the "
            "repetitions"
        )

    def _scoring_window(self) -> float | Literal["bucket"]:
        """Seconds that clips are padded to in evaluation. Pretrained weights know the encoder's whole window,
        and repeat themselves in a shorter one until they have learnt it; a fresh model knows the window
        that it is trained in."""
        asked = self.recipe.evaluation.window
        if asked != "auto":
            return asked
        return self._longest if self.recipe.model.pretrained else self.recipe.data.window

    def summarise(self, counts: Counts) -> dict[str, float]:
        return word_rates(counts)

    def decode(self, output: Tensor) -> list[str]:
        """Token ids `[batch, time]` to text."""
        return [self.tokens.decode(row).strip() for row in output.tolist()]

    @property
    def _longest(self) -> float:
        """Seconds that the encoder has positions for."""
        return longest_window(self.config)

    @property
    def _max_text_tokens(self) -> int:
        """Tokens of text that fit into the decoder after the prompt."""
        return self.config.target_positions - len(self.prompt)

    @cache  # noqa: B019 - a task lives as long as its run
    def _read(self, split: Split) -> SpeechSource:
        asked, longest = self.recipe.data.window, self._longest
        if split == "train" and isinstance(asked, float):
            longest = min(longest, asked)
        return speech_source(self.recipe, split, lowercase=False, longest=longest)

    def _fit_texts(self, source: SpeechSource) -> None:
        """Transcripts beyond the decoder's positions are left out or truncated, by data.long_texts."""
        texts, limit = source.texts, self._max_text_tokens
        candidates = [i for i, text in enumerate(texts) if len(text.encode()) > limit]
        encoded = self.tokens.encode_all(
            [texts[i] for i in candidates], self.recipe.data.timestamps
        )
        long = {i for i, ids in zip(candidates, encoded, strict=True) if len(ids) > limit}
        why = f"the transcript has more than {limit} tokens, the decoder's maximum"
        if self.recipe.data.long_texts == "cut":
            source.note(sorted(long), f"{why}: cut there")
        else:
            source.keep([i not in long for i in range(len(texts))], why)

    def _is_text(self, target: int) -> bool:
        """Neither IGNORE nor the end, nor a timestamp."""
        return 0 <= target < self.tokens.end

    def _tokenize(self) -> WhisperTokens:
        """The tokenizer; a fresh model's vocabulary becomes as large as its tokenizer's."""
        wanted, fresh = self.recipe.data.tokenizer, self._folder is None
        kind = tokenizer_kind(wanted.kind, wanted.path, pretrained=not fresh)
        if kind == "huggingface":
            if wanted.path is not None:
                tokens = WhisperTokens.read(expanded(wanted.path), "data.tokenizer.path")
            else:
                assert self._folder is not None
                tokens = WhisperTokens.read(self._folder, "model.pretrained")
        elif kind == "bytes":
            tokens = WhisperTokens.plain_bytes()
        else:
            tokens = WhisperTokens.learn(self._read("train").texts, wanted.vocabulary_size)
        if fresh:
            vocab = self.recipe.model.vocab_size or tokens.size
            self.config = dataclasses.replace(self.config, vocab=vocab)
        return tokens


def _pretrained(recipe: Recipe) -> Path | None:
    if recipe.model.pretrained is None:
        return None
    return huggingface.locate(recipe.model.pretrained)
