"""`data`: what a run learns from and is scored on, and how a sample is prepared."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from muster.recipe.section import Auto, Count, Fraction, Positive, Section


class SpecAugment(Section):
    """Masks and a warp of the log-mel picture, drawn from (seed, epoch, sample): the same on any layout."""

    freq_masks: Count = Field(
        2,
        description="Bands of mel channels set to 0 of the normalised features: with `normalize: clip` "
        "the clip's mean, with `fixed` and for Whisper one level for all clips.",
    )
    freq_width: Positive = Field(20, description="Widest band, in mel channels.")
    time_masks: Count = Field(2, description="Stretches of time set to 0, likewise.")
    time_width: Fraction = Field(0.1, description="Longest stretch, as a share of the clip.")
    warp: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.1, description="Stretch frequencies by up to this share, as another vocal tract would."
    )


class Tokenizer(Section):
    kind: Literal["auto", "characters", "subwords", "bytes", "huggingface"] = Field(
        "auto",
        description="speech-ctc: `characters`, or `subwords`, byte-pair units learned from the training "
        "text. Language: `bytes`, or `huggingface`, a folder named by `path`. speech-seq2seq: those "
        "two or `subwords`. `auto`: characters for speech-ctc; else the tokenizer beside "
        "`model.pretrained`; else subwords for speech-seq2seq and bytes for language.",
    )
    path: str | None = Field(
        None, description="A Hugging Face tokenizer: a folder, or its tokenizer.json."
    )
    characters: str = Field(
        "abcdefghijklmnopqrstuvwxyz' ", description="The alphabet; the CTC blank is added to it."
    )
    vocabulary_size: Positive = Field(256, description="Units to learn when `kind` is `subwords`.")


class Data(Section):
    train: str = Field(
        "embedded:spoken-numbers",
        description="`embedded:NAME` (spoken-numbers, python-source, digits), a file, a folder of "
        "files, or a glob. Parquet; text also as .jsonl or .txt; images also as MNIST's IDX files.",
    )
    validation: str | None = Field(
        None,
        description="Data scored during training. Default: the validation split beside `train`.",
    )
    test: str | None = Field(
        None, description="Data scored once at the end. Default: the test split beside `train`."
    )
    max_parquet_files: Positive | None = Field(
        None, description="Read only the first so many training files (by name)."
    )
    audio_column: str | None = Field(None, description="Default: found by name and type.")
    text_column: str | None = Field(None, description="Default: text, sentence, transcription …")
    image_column: str | None = Field(None, description="Default: image, img.")
    label_column: str | None = Field(None, description="Default: label, labels, fine_label.")
    sequence_length: Annotated[int, Field(ge=2)] = Field(
        256, description="Tokens per packed sequence of a language model."
    )
    isolate_documents: bool = Field(
        False,
        description="Neither attention nor positions cross from one document into the next within a "
        "packed sequence. Costs the fast causal attention kernel.",
    )
    image_size: Annotated[int, Field(ge=8)] | None = Field(
        None, description="Images are scaled to this height and width. Default: the model's own."
    )
    sample_rate: Annotated[int, Field(ge=4000)] = Field(
        16000, description="Hz; other rates are resampled."
    )
    mels: Annotated[int, Field(ge=8)] = Field(80, description="Mel channels of the features.")
    normalize: Literal["clip", "fixed"] = Field(
        "clip",
        description="`clip`: mean and variance of each clip; `fixed`: one constant, needed for streaming.",
    )
    spec_augment: SpecAugment | None = Field(
        default_factory=lambda: SpecAugment(), description="`null` turns augmentation off."
    )
    tokenizer: Tokenizer = Field(default_factory=lambda: Tokenizer())
    lowercase: bool | Auto = Field(
        "auto",
        description="Lower the case of transcripts before tokenizing. `auto`: for speech-ctc.",
    )
    window: Annotated[float, Field(gt=0, le=30)] | Literal["bucket"] = Field(
        30.0,
        description="speech-seq2seq: seconds that every clip is padded to, 30 as Whisper was "
        "pretrained; or `bucket`: each global batch as long as its longest clip, rounded up to one of "
        "`buckets` lengths, and in evaluation each clip to its own.",
    )
    buckets: Positive = Field(
        16, description="How many window lengths; chosen so that the training clips pad least."
    )
    long_clips: Literal["skip", "cut"] = Field(
        "skip",
        description="Clips beyond `max_seconds` (and beyond Whisper's 30 s): left out, or cut there. "
        "Either way they are counted and reported.",
    )
    long_texts: Literal["skip", "cut"] = Field(
        "skip",
        description="speech-seq2seq: transcripts of more tokens than the decoder has positions.",
    )
    language: str | None = Field(
        None,
        description="speech-seq2seq: the language spoken, such as `en`, for the prompt of a "
        "multilingual model.",
    )
    speech_task: Literal["transcribe", "translate"] = Field(
        "transcribe", description="speech-seq2seq: the task in a multilingual model's prompt."
    )
    timestamps: bool = Field(
        False,
        description="speech-seq2seq: learn the marks such as <|1.20|> in transcripts that have them; "
        "`false` drops them.",
    )
    unknown_characters: Literal["error", "drop"] = Field(
        "error", description="What to do with characters outside the vocabulary."
    )
    min_seconds: Annotated[float, Field(ge=0)] = Field(
        0.1, description="Shorter clips are left out."
    )
    max_seconds: Annotated[float, Field(gt=0)] = Field(
        30.0, description="Longer clips are left out, or cut: see `long_clips`."
    )
    max_bad_fraction: Fraction = Field(
        0.01,
        description="Rows that cannot be read are left out and named; more than this share is an error.",
    )
    pool_batches: Positive = Field(
        16,
        description="Clips are shuffled, then sorted by length inside pools of this many global batches, "
        "so that a batch holds clips of like length.",
    )
    shuffle: Literal["auto", "full", "groups"] = Field(
        "auto",
        description="`full`: any clip may follow any other. `groups`: parquet row groups are shuffled, "
        "and clips within a few of them at a time, so that a corpus larger than memory is read in "
        "order. `auto`: `groups` where the decoded audio exceeds `cache_gib`.",
    )
    workers: Positive | Auto = Field("auto", description="Decoding threads per rank.")
    prefetch: Positive = Field(4, description="Global batches prepared ahead.")
    cache_gib: Annotated[float, Field(ge=0)] = Field(
        1.0, description="Memory per rank for decoded clips, kept from one epoch to the next."
    )
