"""CTC with a pretrained speech encoder of transformers: Wav2Vec2, HuBERT, WavLM, Wav2Vec2-BERT."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from muster.data.corpus import Split
from muster.data.loader import Batch, Inputs
from muster.data.speech.ctc_tokenizer import FILES, FolderVocabulary, tokenizer_files
from muster.data.speech.source import SpeechSource
from muster.data.speech.vocabulary import Vocabulary
from muster.data.speech.waveforms import (
    MEL,
    RAW,
    ExtractorSettings,
    RawAudio,
    StackedMel,
    make_extractor,
    read_extractor,
)
from muster.errors import RecipeError
from muster.models.huggingface import folder as huggingface
from muster.models.huggingface import speech, speech_folder
from muster.models.huggingface.speech import MEL_FAMILY, SpeechEncoderCTC
from muster.models.weights import Weights
from muster.reading.files import expanded
from muster.recipe.schema import Recipe
from muster.tasks.base import Lengths
from muster.tasks.speech import speech_source
from muster.tasks.speech_ctc import SpeechCTC

PAD_STEP_S = 0.32  # batches are padded to multiples, where the output depends on padding


class SpeechEncoder(SpeechCTC):
    """A folder's model, with its own head and vocabulary or a fresh one."""

    logmel: RawAudio | StackedMel

    def __init__(self, recipe: Recipe, assets: dict[str, Any] | None = None) -> None:
        self.recipe = recipe
        self._folder: Path | None = None
        self.files: dict[str, str] = {}  # the tokenizer's, by name
        if recipe.model.lora is not None:
            raise RecipeError(
                "model.lora: adapters are for language models and Whisper, and not for speech encoders; "
                "leave it out"
            )
        if assets is None:
            self._folder = huggingface.locate(str(recipe.model.pretrained))
            document = speech_folder.read_document(self._folder)
            self.extractor = _read_extractor(self._folder, document)
            self.new_head = self._wants_new_head(self._folder)
        else:
            document, self.files = assets["config"], assets["files"]
            self.extractor = ExtractorSettings(**assets["extractor"])
            self.new_head = assets["new_head"]
        self._check_extractor(document)
        self.document = document
        super().__init__(recipe, assets)
        if assets is None:
            blank = self.vocabulary.blank
            document = speech.with_head(document, self.vocabulary.size, blank)
            masked = self._masks_time(document)
            self.document = speech.with_mask_embedding(document) if masked else document
        self.assets |= {
            "config": self.document,
            "extractor": self.extractor.to_json(),
            "files": self.files,
            "new_head": self.new_head,
        }
        self._reads_padding = speech.reads_padding(self.document, self.extractor.masks_padding)

    def build_model(self) -> SpeechEncoderCTC:
        wanted = self.recipe.model
        return SpeechEncoderCTC(
            self.document,
            masks_padding=self.extractor.masks_padding,
            time_masks=self._masks_time(self.document),
            dropout=wanted.dropout,
            freeze_features=wanted.freeze_feature_encoder,
            freeze_encoder=wanted.freeze_encoder,
        )

    def build_part(self, start: int, stop: int) -> nn.Module:
        raise RecipeError(
            "distributed.strategy: a speech encoder cannot be split into pipeline stages"
        )

    def weights(self) -> Weights:
        self._folder = self._folder or huggingface.locate(str(self.recipe.model.pretrained))
        return speech_folder.EncoderWeights(
            self._folder, self.document, seed=self.recipe.seed, new_head=self.new_head
        )

    @property
    def mels(self) -> int:
        return self.extractor.mels

    def windows(self, lengths: Lengths, *, training: bool) -> Lengths | None:
        if not self._reads_padding:
            return None
        return np.ceil(lengths / PAD_STEP_S - 1e-6) * PAD_STEP_S

    def prepare(self, batch: Batch) -> Batch:
        tensors = batch.tensors
        self.logmel.to(tensors["samples"].device)
        options: dict[str, Any] = {"warp": tensors.get("warp")}
        if isinstance(self.logmel, StackedMel) and "bands" in tensors:
            options["masks"] = (tensors["bands"], tensors["stretches"])
        features, frames = self.logmel(tensors["samples"], tensors["lengths"], **options)
        return batch.adding(features=features, frames=frames)

    def inputs(self, batch: Batch) -> Inputs:
        args = (batch["features"], batch["frames"])
        masks = isinstance(self.logmel, RawAudio) and "stretches" in batch.tensors
        return Inputs((*args, batch["stretches"]) if masks else args)

    def exported_files(self) -> dict[str, bytes]:
        """What transformers' processor needs, beside the model."""
        extractor = json.dumps(self.extractor.document(), indent=2) + "\n"
        own = {name: text.encode() for name, text in self.files.items()}
        return (own or tokenizer_files(self.vocabulary)) | {
            "preprocessor_config.json": extractor.encode()
        }

    def _features(self) -> RawAudio | StackedMel:
        return make_extractor(self.extractor, speech.least_samples(self.document))

    def _padded(self, samples: int, longest: float | None) -> int:
        """To the longest clip of the global batch where the output depends on padding."""
        rate = self.recipe.data.sample_rate
        if self._reads_padding:
            step = round(PAD_STEP_S * rate)
            wanted = max(samples, round((longest or 0.0) * rate))
            samples = math.ceil(wanted / step) * step
        return max(samples, self.logmel.least)

    def _masks_time(self, document: speech.Document) -> bool:
        """Whether stretches of the encoder's input are masked; log-mel features are masked themselves."""
        on = self.recipe.data.spec_augment is not None
        return on and document["model_type"] != MEL_FAMILY

    def _wants_new_head(self, folder: Path) -> bool:
        wanted = self.recipe.data.tokenizer
        if wanted.kind == "huggingface" or (wanted.kind == "auto" and wanted.path is None):
            return wanted.path is not None or not speech_folder.has_head(folder)
        return True

    def _new_vocabulary(self) -> Vocabulary:
        wanted = self.recipe.data.tokenizer
        if wanted.path is not None and wanted.kind in ("auto", "huggingface"):
            key, folder = "data.tokenizer.path", expanded(wanted.path)
        elif self.new_head and wanted.kind != "huggingface":
            return self._learn_vocabulary()
        else:
            assert self._folder is not None
            key, folder = "model.pretrained", self._folder
        self.files = {n: (folder / n).read_text() for n in FILES if (folder / n).is_file()}
        size = None if self.new_head else self.document["vocab_size"]
        return FolderVocabulary.read(folder, key, size)

    def _read(self, split: Split) -> SpeechSource:
        """A vocabulary with both cases keeps that of the transcripts."""
        vocabulary = getattr(self, "vocabulary", None)
        cased = isinstance(vocabulary, FolderVocabulary) and vocabulary.cased
        return speech_source(self.recipe, split, lowercase=not cased)

    def _check_extractor(self, document: speech.Document) -> None:
        rate, settings = self.recipe.data.sample_rate, self.extractor
        if rate != settings.sample_rate:
            raise RecipeError(
                f"data.sample_rate: {self.recipe.model.pretrained} reads {settings.sample_rate} Hz, not "
                f"{rate}; set it to {settings.sample_rate}, and clips of other rates are resampled"
            )
        width = settings.mels * settings.stride
        if settings.kind == MEL and width != document.get("feature_projection_input_dim", 160):
            raise RecipeError(
                f"model.pretrained: its preprocessor_config.json gives {width} features, its config.json "
                f"reads {document.get('feature_projection_input_dim', 160)}; copy the folder again"
            )


def _read_extractor(folder: Path, document: speech.Document) -> ExtractorSettings:
    kind = MEL if document["model_type"] == MEL_FAMILY else RAW
    return read_extractor(folder, kind, speech.normalises_frames(document))
