"""Shared by the two speech tasks: clips, SpecAugment, word error rate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from muster.data import corpus
from muster.data.corpus import Split
from muster.data.speech.features import Augmentation, draw
from muster.data.speech.source import SpeechLimits, SpeechSample, SpeechSource
from muster.evaluate.error_rates import EditCounts, count
from muster.recipe.schema import Recipe
from muster.tasks.base import Counts, Example, Score

MANY = 3  # times that each word occurs, on average, in a text that repeats itself
SHOWN = 60  # characters of an example


def speech_files(recipe: Recipe, split: Split) -> list[Path]:
    data = recipe.data
    return corpus.split_files(
        data.sources, data.validation, data.test, split, data.max_parquet_files
    )


def speech_source(
    recipe: Recipe, split: Split, *, lowercase: bool, longest: float = float("inf")
) -> SpeechSource:
    """The clips of a split. `longest` is the model's maximum in seconds."""
    data = recipe.data
    limits = SpeechLimits(
        sample_rate=data.sample_rate,
        min_seconds=data.min_seconds,
        max_seconds=min(data.max_seconds, longest),
        max_bad_fraction=data.max_bad_fraction,
        lowercase=lowercase if data.lowercase == "auto" else data.lowercase,
        cache_bytes=int(data.cache_gib * 2**30),
        long_clips=data.long_clips,
        shuffle=data.shuffle,
    )
    source = SpeechSource(speech_files(recipe, split), limits, data.audio_column, data.text_column)
    if split == "train" and data.weights:
        parts = corpus.train_files(data.sources, data.max_parquet_files)
        source.file_counts = [len(files) for files in parts]
    return source


def pad_waves(samples: Sequence[SpeechSample], size: int | None = None) -> Tensor:
    """`[clips, size]`, zeros after each clip; by default as long as the longest."""
    waves = np.zeros((len(samples), size or max(len(s.samples) for s in samples)), np.float32)
    for row, sample in zip(waves, samples, strict=True):
        clip = sample.samples[: len(row)]  # may be a sample longer by rounding
        row[: len(clip)] = clip
    return torch.from_numpy(waves)


def augmentation(
    recipe: Recipe, samples: Sequence[SpeechSample], epoch: int | None, mels: int
) -> dict[str, Tensor]:
    """Each clip's draw from (seed, epoch, clip); nothing in evaluation or where the recipe says so."""
    if epoch is None or recipe.data.spec_augment is None:
        return {}
    options = Augmentation(**recipe.data.spec_augment.model_dump())
    keys = [(recipe.seed, epoch, sample.id) for sample in samples]
    bands, stretches, warp = zip(*(draw(key, mels, options) for key in keys), strict=True)
    return {
        "bands": torch.from_numpy(np.stack(bands)),
        "stretches": torch.from_numpy(np.stack(stretches)),
        "warp": torch.tensor(warp),
    }


def silent_sample(recipe: Recipe, seconds: float) -> SpeechSample:
    """The longest clip there may be, for a plan without data."""
    count = int(min(recipe.data.max_seconds, seconds) * recipe.data.sample_rate)
    return SpeechSample(0, np.zeros(count, np.float32), "a" * 40)


def word_score(clips: Iterable[tuple[int, str, str]]) -> Score:
    """From (id, reference, hypothesis) of each clip. One without a reference is empty after
    normalisation, or broken."""
    total, examples = EditCounts(), []
    for sample_id, reference, hypothesis in clips:
        if not reference:
            continue
        counts = count(reference, hypothesis)
        examples.append(Example(sample_id, reference, hypothesis, counts.word_edits))
        total += counts
    return Score(asdict(total), examples)


def wer_remarks(scores: dict[str, float], worst: Sequence[Example], cure: str) -> list[str]:
    """Why more words are wrong than were said; nothing at a WER of at most 100 %."""
    if scores["wer"] <= 1:
        return []
    words, insertions = int(scores["words"]), int(scores["word_insertions"])
    edits = sum(
        int(scores[f"word_{kind}"]) for kind in ("substitutions", "deletions", "insertions")
    )
    told = (
        f"a WER above 100 %: {words:,} words were said, and {insertions:,} of the {edits:,} edits are "
        "insertions, words that nobody said"
    )
    if repeated := next((e for e in worst if repeats(e.hypothesis)), None):
        told += f". The model repeats itself, as in {repeated.hypothesis[:SHOWN]!r}"
    return [f"{told}. {cure}"]


def repeats(text: str) -> bool:
    """Whether most words of a text occur in it many times."""
    words = text.split()
    return len(words) >= 2 * MANY and len(words) >= MANY * len(set(words))


def word_rates(counts: Counts) -> dict[str, float]:
    total = EditCounts(**{name: int(value) for name, value in counts.items()})
    return {"wer": total.wer, "cer": total.cer, **counts}
