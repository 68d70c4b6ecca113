"""Whisper's text: tokens, the prompt, and timestamps.

`WhisperTokens` travels inside checkpoints as JSON, and `files` writes what transformers needs to load it again.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from muster.data.speech.whisper_languages import LANGUAGES, language_code
from muster.data.speech.whisper_tokenizer import (
    END,
    NO_TIMESTAMPS,
    START,
    TASKS,
    TIMESTAMPS,
    UNUSED_TOKENS,
    learn_tokenizer,
    read_tokenizer,
)
from muster.data.speech.windows import TICKS_PER_SECOND
from muster.data.text import tokenizer_bounds
from muster.errors import DataError, RecipeError
from muster.reading.libraries import refused

POSITIONS = 448

_TIMESTAMP = re.compile(r"<\|(\d+\.\d+)\|>")
_TIMESTAMPS = re.compile(r"\s*(?:<\|\d+\.\d+\|>\s*)+")

Segment = tuple[float, float | None, str]
"""Seconds it begins and, where the model says so, ends; its text."""


class WhisperTokens:
    """Ids: the text's, then `end`, `start` and the other special tokens, then the timestamps.

    `languages` maps the code of each language that has a token to its id. OpenAI's English-only
    models have those tokens too and never learned them: `multilingual` is what counts.
    """

    def __init__(self, document: str, multilingual: bool) -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_str(document)
        tokenizer_bounds.check(self._tokenizer, "the saved tokenizer", DataError)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Without added tokens, a special token spelt out in a transcript is encoded as text.
        bare = json.loads(self._tokenizer.to_str()) | {"added_tokens": [], "post_processor": None}
        self._model = bare["model"]
        self._text = tokenizers.Tokenizer.from_str(json.dumps(bare))
        self.size = max(self._tokenizer.get_vocab().values()) + 1
        self.end, self.start = self._id(END), self._id(START)
        self.no_timestamps = self._id(NO_TIMESTAMPS)
        self.first_timestamp = self._id(TIMESTAMPS[0])
        self.languages = {
            code: i
            for code in LANGUAGES
            if (i := self._tokenizer.token_to_id(f"<|{code}|>")) is not None
        }
        self.multilingual = multilingual

    @classmethod
    def read(cls, folder: Path, key: str) -> WhisperTokens:
        """From a Hugging Face folder or its tokenizer.json; `key` is the recipe key that named it."""
        tokenizer, multilingual = read_tokenizer(folder, key)
        return cls(tokenizer.to_str(), multilingual)

    @classmethod
    def learn(cls, texts: Iterable[str], size: int) -> WhisperTokens:
        """From transcripts: bytes and at most `size` longer units. Without language tokens."""
        tokenizer = learn_tokenizer((drop_timestamps(text) for text in texts), size)
        return cls(tokenizer.to_str(), multilingual=False)

    @classmethod
    def plain_bytes(cls) -> WhisperTokens:
        """One token per byte of UTF-8."""
        return cls.learn((), 0)

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> WhisperTokens:
        if saved.get("kind") != "whisper":
            raise DataError(f"the saved tokenizer has kind {saved.get('kind')!r}; expected whisper")
        with refused("the saved tokenizer", "copy the checkpoint again", DataError):
            return WhisperTokens(saved["tokenizer"], saved["multilingual"])

    def to_json(self) -> dict[str, Any]:
        document = self._tokenizer.to_str()
        return {"kind": "whisper", "tokenizer": document, "multilingual": self.multilingual}

    def prompt(self, language: str | None, task: str, timestamps: bool) -> list[int]:
        """The decoder's prompt. Only a multilingual model has tokens for the language and the task
        (transcribe or translate, the latter into English)."""
        prompt = [self.start]
        if self.multilingual:
            prompt += [self.languages[self._code(language)], self._id(f"<|{task}|>")]
        else:
            self._refuse_for_one_language(language, task)
        return prompt if timestamps else [*prompt, self.no_timestamps]

    def encode(self, text: str, timestamps: bool = False) -> list[int]:
        """Ids of a transcript, without prompt and end. transformers adds no space in front of a
        transcript, so neither does muster. Timestamps such as <|1.20|> become tokens or are dropped."""
        return self.encode_all([text], timestamps)[0]

    def encode_all(self, texts: Sequence[str], timestamps: bool = False) -> list[list[int]]:
        split = [_TIMESTAMP.split(text if timestamps else drop_timestamps(text)) for text in texts]
        pieces = [piece for parts in split for piece in parts[::2]]
        encoded = iter(self._text.encode_batch_fast(pieces, add_special_tokens=False))
        found = []
        for parts in split:
            ids: list[int] = list(next(encoded).ids)
            for mark in parts[1::2]:
                ids += [self._timestamp(mark), *next(encoded).ids]
            found.append(ids)
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """The text alone. Bytes that are no UTF-8 become U+FFFD."""
        kept = [i for i in ids if i < self.size and not self._is_timestamp(i)]
        text: str = self._tokenizer.decode(kept, skip_special_tokens=True)
        return text

    def segments(self, ids: Iterable[int]) -> list[Segment]:
        """The segments of text between timestamps. Ids without timestamps are one segment from 0."""
        found: list[Segment] = []
        start, pending = 0.0, list[int]()
        for i in (*ids, None):
            if i is not None and not self._is_timestamp(i):
                pending.append(i)
                continue
            time = None if i is None else (i - self.first_timestamp) / TICKS_PER_SECOND
            if (text := self.decode(pending)).strip():
                found.append((start, time, text))
            start, pending = time or 0.0, []
        return found

    @property
    def suppress(self) -> tuple[int, ...]:
        """Special tokens that are not part of a transcript."""
        ids = (self._tokenizer.token_to_id(token) for token in (START, *TASKS, *UNUSED_TOKENS))
        return tuple(i for i in ids if i is not None)

    @property
    def suppress_first(self) -> tuple[int, ...]:
        """Tokens that must not come first: a single space, and the end."""
        return (*self.encode(" "), self.end)

    def files(self) -> dict[str, bytes]:
        """The tokenizer's part of a folder that transformers' WhisperProcessor loads."""
        added = json.loads(self._tokenizer.to_str())["added_tokens"]
        special = [token["content"] for token in added if token["special"]]
        names: dict[str, Any] = dict.fromkeys(
            ("bos_token", "eos_token", "unk_token", "pad_token"), END
        )
        names["additional_special_tokens"] = [name for name in special if name != END]
        config = {
            **names,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "language": None,
            "model_max_length": 1024,
            "predict_timestamps": False,
            "processor_class": "WhisperProcessor",
            "task": None,
            "tokenizer_class": "WhisperTokenizer",
        }
        merges = ["#version: 0.2", *(" ".join(pair) for pair in self._model["merges"]), ""]
        return {
            "tokenizer.json": self._tokenizer.to_str(pretty=True).encode(),
            "tokenizer_config.json": _to_bytes(config),
            "special_tokens_map.json": _to_bytes(names),
            "vocab.json": _to_bytes(self._model["vocab"]),
            "merges.txt": "\n".join(merges).encode(),
        }

    def generation_config(
        self,
        suppress: Sequence[int] = (),
        suppress_first: Sequence[int] = (),
        language: str | None = None,
        task: str = "transcribe",
    ) -> dict[str, Any]:
        """generation_config.json. A multilingual model given no language detects it by itself."""
        config: dict[str, Any] = {
            "bos_token_id": self.end,
            "decoder_start_token_id": self.start,
            "eos_token_id": self.end,
            "pad_token_id": self.end,
            "no_timestamps_token_id": self.no_timestamps,
            "prev_sot_token_id": self._id("<|startofprev|>"),
            "suppress_tokens": list(suppress) or None,
            "begin_suppress_tokens": list(suppress_first) or None,
            "max_initial_timestamp_index": TICKS_PER_SECOND,
            "max_length": POSITIONS,
            "is_multilingual": self.multilingual,
            "return_timestamps": False,
        }
        if self.multilingual:
            config["lang_to_id"] = {f"<|{code}|>": i for code, i in self.languages.items()}
            config["task_to_id"] = {t: self._id(f"<|{t}|>") for t in ("transcribe", "translate")}
            config["task"] = task
            if language is not None:
                config["language"] = self._code(language)
        return config

    def _id(self, token: str) -> int:
        i: int | None = self._tokenizer.token_to_id(token)
        if i is None:
            raise DataError(f"the tokenizer lacks {token}, which every Whisper model has")
        return i

    def _is_timestamp(self, i: int) -> bool:
        return 0 <= i - self.first_timestamp < len(TIMESTAMPS)

    def _timestamp(self, seconds: str) -> int:
        tick = round(float(seconds) * TICKS_PER_SECOND)
        if tick >= len(TIMESTAMPS):
            raise DataError(
                f"a transcript has the timestamp <|{seconds}|>, and Whisper's end at {TIMESTAMPS[-1]}; split "
                "the clip into shorter ones, or set data.timestamps=false, which drops all timestamps"
            )
        return self.first_timestamp + tick

    def _code(self, language: str | None) -> str:
        code = language_code(language) if language else None
        if code in self.languages:
            return code
        known = ", ".join(self.languages)
        if not language:
            raise RecipeError(
                "data.language: a multilingual Whisper needs the language of the audio; set it, "
                f"as in data.language=en, to one of {known}"
            )
        names = [name for code in self.languages for name in (code, LANGUAGES[code])]
        near = difflib.get_close_matches(language.lower(), names, n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise RecipeError(
            f"data.language: {language} is no language of this model; {hint}It has {known}"
        )

    def _refuse_for_one_language(self, language: str | None, task: str) -> None:
        """A tokenizer trained by muster has no language tokens."""
        if self.languages and language and language_code(language) != "en":
            raise RecipeError(
                f"data.language: {language} does not fit an English-only model; use a "
                "multilingual one (a name without .en), or set data.language=en"
            )
        if task != "transcribe":
            raise RecipeError(
                f"data.speech_task: {task} needs a multilingual model; set it to transcribe"
            )


def tokenizer_kind(asked: str, path: str | None, *, pretrained: bool) -> str:
    """What `data.tokenizer` means for Whisper."""
    kind = asked
    if kind == "auto":
        kind = "huggingface" if pretrained or path is not None else "subwords"
    if kind == "huggingface" and path is None and not pretrained:
        raise RecipeError(
            "data.tokenizer.path: needed for data.tokenizer.kind=huggingface: the folder of "
            "a Whisper model"
        )
    if kind not in ("subwords", "bytes", "huggingface"):
        raise RecipeError(
            f"data.tokenizer.kind: {kind} is for speech-ctc; speech-seq2seq takes subwords, bytes "
            "or huggingface"
        )
    return kind


def timestamps_in_range(text: str) -> bool:
    """Whether every timestamp in the text is within Whisper's 30 s."""
    return all(
        round(float(m) * TICKS_PER_SECOND) < len(TIMESTAMPS) for m in _TIMESTAMP.findall(text)
    )


def drop_timestamps(text: str) -> str:
    """The transcript without timestamps."""
    return _TIMESTAMPS.sub(" ", text).strip() if _TIMESTAMP.search(text) else text


def _to_bytes(document: object) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
