"""`data`: what a run learns from and is scored on, and how a sample is prepared."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from muster import urls
from muster.recipe.section import Auto, Count, Fraction, Positive, Section, fixed, free


class SpecAugment(Section):
    """Masks and a warp of the log-mel picture, drawn from (seed, epoch, sample): the same on any layout."""

    freq_masks: Count = Field(
        2,
        description="Bands of mel channels set to 0 of the normalised features: with `normalize: clip` "
        "the clip's mean, with `fixed` and for Whisper one level for all clips.",
    )
    freq_width: Positive = Field(20, description="Widest frequency mask, in mel channels.")
    time_masks: Count = Field(2, description="Time masks, likewise.")
    time_width: Fraction = Field(0.1, description="Longest time mask, as a fraction of the clip.")
    warp: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.1,
        description="Warp frequencies by up to this fraction (vocal tract length perturbation).",
    )


class Tokenizer(Section):
    kind: Literal["auto", "characters", "subwords", "bytes", "huggingface"] = Field(
        "auto",
        description="speech-ctc: `characters`, or `subwords`, byte-pair units learned from the training "
        "text; with `model.pretrained` also `huggingface`, the vocabulary of the folder, or of `path` for a "
        "fresh head. Language: `bytes`, or `huggingface`, a folder named by `path`. speech-seq2seq: those "
        "two or `subwords`. `auto`: characters for speech-ctc, but the vocabulary of a "
        "`model.pretrained` with a CTC head; else the tokenizer beside "
        "`model.pretrained`; else subwords for speech-seq2seq and bytes for language.",
    )
    path: str | None = Field(
        None, description="A Hugging Face tokenizer: a folder, or its tokenizer.json."
    )
    characters: str = Field(
        "abcdefghijklmnopqrstuvwxyz' ", description="The alphabet; the CTC blank is added to it."
    )
    vocabulary_size: Positive = Field(256, description="Units to learn when `kind` is `subwords`.")


class TrainSource(Section):
    """One of several corpora."""

    path: str
    weight: Annotated[float, Field(gt=0)] | None = None


class Data(Section):
    train: (
        str
        | Annotated[
            list[TrainSource],
            Field(json_schema_extra={"words": "a list of {path: …, weight: …}"}),
        ]
    ) = fixed(
        "embedded:spoken-numbers",
        description="`embedded:NAME` (spoken-numbers, python-source, digits), a file, a folder of "
        "files, or a glob. Parquet; text also as .jsonl or .txt; images also as MNIST's IDX files. Also at "
        "`s3://`, `gs://`, `hf://datasets/OWNER/NAME` or `https://`. Speech and language also as a list of "
        "`{path: …, weight: …}`: corpora that are mixed by weight, or just joined where none has a weight.",
    )
    validation: str | None = free(
        None,
        description="Data scored during training. Default: the validation split beside `train`.",
    )
    test: str | None = free(
        None, description="Data scored once at the end. Default: the test split beside `train`."
    )
    max_parquet_files: Positive | None = fixed(
        None, description="Maximum number of training files, sorted by name."
    )
    audio_column: str | None = fixed(None, description="Default: found by name and type.")
    text_column: str | None = fixed(None, description="Default: text, sentence, transcription …")
    image_column: str | None = fixed(None, description="Default: image, img.")
    label_column: str | None = fixed(None, description="Default: label, labels, fine_label.")
    format: Literal["auto", "text", "chat"] = fixed(
        "auto",
        description="causal-lm: `text`, or `chat`, rows of messages with loss on the replies alone. "
        "`auto`: what the first row of the training data is.",
    )
    chat_template: str | None = fixed(
        None,
        description="Chat rows: a Jinja file, a folder that has a chat template, or `basic`, a plain "
        "one for any tokenizer. Default: the tokenizer's own.",
    )
    pack_rows: bool = fixed(
        True,
        description="Several chat rows share a sequence of `sequence_length`, without seeing each "
        "other. `false`: one row per sequence.",
    )
    sequence_length: Annotated[int, Field(ge=2)] = fixed(
        256, description="Tokens per packed sequence of a language model."
    )
    sequence_packing: Literal["shuffled", "shifted", "fixed"] = fixed(
        "shuffled",
        description="Language: where each epoch cuts the training text into sequences. `shuffled`: its "
        "documents in another order and its cuts in other places, drawn from (seed, epoch); `shifted`: "
        "the cuts alone; `fixed`: every epoch has the same sequences. Text that is scored is always "
        "cut in the same places.",
    )
    isolate_documents: bool = fixed(
        False,
        description="Neither attention nor positions cross from one document into the next within a "
        "packed sequence. On NVIDIA GPUs in half precision by torch's variable-length kernel, elsewhere by a mask.",
    )
    image_size: Annotated[int, Field(ge=8)] | None = fixed(
        None, description="Images are scaled to this height and width. Default: the model's own."
    )
    sample_rate: Annotated[int, Field(ge=4000)] = fixed(
        16000, description="Hz; other rates are resampled."
    )
    mels: Annotated[int, Field(ge=8)] = fixed(80, description="Mel channels of the features.")
    normalize: Literal["clip", "fixed"] = fixed(
        "clip",
        description="`clip`: mean and variance of each clip; `fixed`: one constant, needed for streaming.",
    )
    spec_augment: SpecAugment | None = fixed(
        default_factory=lambda: SpecAugment(),
        description="`null` turns augmentation off. Models over raw audio take the time masks alone.",
    )
    tokenizer: Tokenizer = fixed(default_factory=lambda: Tokenizer())
    lowercase: bool | Auto = fixed(
        "auto",
        description="Lower the case of transcripts before tokenizing. `auto`: for speech-ctc, unless a "
        "pretrained model's vocabulary has both cases.",
    )
    window: Annotated[float, Field(gt=0, le=30)] | Literal["bucket"] = fixed(
        30.0,
        description="speech-seq2seq: seconds that every clip is padded to, 30 as Whisper was "
        "pretrained; or `bucket`: each global batch as long as its longest clip, rounded up to one of "
        "`buckets` lengths, and in evaluation each clip to its own.",
    )
    buckets: Positive = fixed(
        16, description="How many window lengths; chosen to minimize padding of the training clips."
    )
    long_clips: Literal["skip", "cut"] = fixed(
        "skip",
        description="Clips beyond `max_seconds` (and beyond Whisper's 30 s): left out, or truncated. "
        "Either way they are counted and reported.",
    )
    long_texts: Literal["skip", "cut"] = fixed(
        "skip",
        description="speech-seq2seq: transcripts of more tokens than the decoder has positions. Chat: rows of "
        "more tokens than `sequence_length`. Left out, or cut; counted and reported.",
    )
    language: str | None = fixed(
        None,
        description="speech-seq2seq: the language spoken, such as `en`, for the prompt of a "
        "multilingual model.",
    )
    speech_task: Literal["transcribe", "translate"] = fixed(
        "transcribe", description="speech-seq2seq: the task in a multilingual model's prompt."
    )
    timestamps: bool = fixed(
        False,
        description="speech-seq2seq: train on timestamps such as <|1.20|> in transcripts that have them; "
        "`false` drops them.",
    )
    unknown_characters: Literal["error", "drop"] = fixed(
        "error", description="What to do with characters outside the vocabulary."
    )
    min_seconds: Annotated[float, Field(ge=0)] = fixed(
        0.1, description="Shorter clips are left out."
    )
    max_seconds: Annotated[float, Field(gt=0)] = fixed(
        30.0, description="Longer clips are left out, or truncated: see `long_clips`."
    )
    max_bad_fraction: Fraction = free(
        0.01,
        description="Rows that cannot be read are left out and named; more than this share is an error.",
    )
    pool_batches: Positive = fixed(
        16,
        description="Clips are shuffled, then sorted by length inside pools of this many global batches, "
        "so that a batch has clips of similar length.",
    )
    shuffle: Literal["auto", "full", "groups"] = fixed(
        "auto",
        description="`full`: all clips are shuffled. `groups`: parquet row groups are shuffled, "
        "and clips within a few of them at a time, so that a corpus larger than memory is read in "
        "order. `auto`: `groups` where the decoded audio exceeds `cache_gib`.",
    )
    workers: Positive | Auto = free("auto", description="Decoding threads per rank.")
    prefetch: Positive = free(4, description="Global batches to prefetch.")
    cache_gib: Annotated[float, Field(ge=0)] = free(
        1.0, description="Memory per rank to cache decoded clips between epochs."
    )

    @field_validator("train", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        """What pydantic would say of each alternative, in one sentence."""
        if not isinstance(value, list):
            return value
        form = "expected [{path: FOLDER, weight: 3}, {path: OTHER, weight: 1}]"
        weights = []
        for number, item in enumerate(value, 1):
            given = vars(item) if isinstance(item, TrainSource) else item
            if not (isinstance(given, dict) and isinstance(given.get("path"), str)):
                raise ValueError(f"source {number} has no path; {form}")
            if other := sorted(set(given) - {"path", "weight"}):
                raise ValueError(f"source {number} has the key {other[0]}; {form}")
            weight = given.get("weight")
            number_like = isinstance(weight, int | float) and not isinstance(weight, bool)
            if weight is not None and not (number_like and 0 < weight < math.inf):
                raise ValueError(
                    f"source {number} has the weight {weight!r}; expected a number above 0"
                )
            weights.append(weight is None)
        if not value:
            raise ValueError(f"the list is empty; {form}")
        if any(weights) and not all(weights):
            raise ValueError(
                f"source {weights.index(True) + 1} has no weight and others have; give all of them one, or none"
            )
        return value

    @field_validator("train", "validation", "test")
    @classmethod
    def _without_secrets(
        cls, value: str | list[TrainSource] | None
    ) -> str | list[TrainSource] | None:
        for part in value if isinstance(value, list) else [value]:
            path = part.path if isinstance(part, TrainSource) else part
            if path is not None:
                urls.refuse_secrets(path)
        return value

    @property
    def sources(self) -> tuple[str, ...]:
        """The corpora of `train`."""
        if isinstance(self.train, str):
            return (self.train,)
        return tuple(source.path for source in self.train)

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Theirs, where they have any and are several."""
        if isinstance(self.train, str) or len(self.train) < 2:
            return None
        given = tuple(source.weight for source in self.train if source.weight is not None)
        return given or None

    @property
    def train_words(self) -> str:
        """For messages."""
        return ", ".join(self.sources)
