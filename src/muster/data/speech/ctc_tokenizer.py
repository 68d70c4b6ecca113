"""The vocabulary of a Hugging Face CTC model: vocab.json, as Wav2Vec2CTCTokenizer reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from muster.data.speech.vocabulary import Vocabulary
from muster.errors import MusterError, RecipeError
from muster.reading import json_file
from muster.reading.text import in_one_line

VOCABULARY, SETTINGS = "vocab.json", "tokenizer_config.json"
FILES = (VOCABULARY, SETTINGS, "special_tokens_map.json", "added_tokens.json")
TOKENIZERS = ("Wav2Vec2CTCTokenizer", "Wav2Vec2Tokenizer", None)
SPECIAL = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
LARGEST_ID = 2**20
DELIMITERS = ("|", "▁", "_", "\N{SYMBOL FOR SPACE}")


@dataclass(frozen=True)
class TokenizerSettings:
    special: tuple[str, ...]  # tokens that are no text
    pad: str  # the blank
    delimiter: str = "|"  # stands for a space
    fold: bool = False  # the tokenizer changes text to upper case, and back


class FolderVocabulary(Vocabulary):
    """Ids as the folder has them. The blank is its padding token, wherever that is.

    A vocabulary without lower-case letters reads and gives lower-case text, as transcripts are
    written in every other recipe.
    """

    def __init__(self, tokens: Mapping[str, int], size: int, settings: TokenizerSettings) -> None:
        self.tokens, self.rows, self.settings = dict(tokens), size, settings
        self.blank = self.tokens[settings.pad]
        text = {
            i: " " if token == settings.delimiter else token
            for token, i in self.tokens.items()
            if token not in settings.special
        }
        letters = "".join(text.values())
        self.cased = letters != letters.lower() and letters != letters.upper()
        self._fold = settings.fold or (letters != letters.lower() and not self.cased)
        if self._fold:
            text = {i: piece.lower() for i, piece in text.items()}
        self.pieces = tuple(text.get(i, "") for i in range(size))
        self._ids = {piece: i for i, piece in text.items() if len(piece) == 1}
        upper = {c.upper() for c in self._ids} if self._fold else set()
        self.alphabet = frozenset(self._ids) | {c for c in upper if len(c) == 1}

    def to_json(self) -> dict[str, Any]:
        settings = asdict(self.settings) | {"special": list(self.settings.special)}
        return {"kind": "folder", "tokens": self.tokens, "size": self.rows, "settings": settings}

    @classmethod
    def read_json(cls, saved: Mapping[str, Any]) -> FolderVocabulary:
        size, ids = saved["size"], saved["tokens"].values()
        if (
            type(size) is not int
            or not 0 < size <= LARGEST_ID
            or not all(type(i) is int and 0 <= i < size for i in ids)
        ):
            raise ValueError(
                f"its ids are not below {in_one_line(size)}, or that beyond {LARGEST_ID}"
            )
        settings = saved["settings"] | {"special": tuple(saved["settings"]["special"])}
        return cls(saved["tokens"], size, TokenizerSettings(**settings))

    @classmethod
    def read(cls, folder: Path, key: str, size: int | None = None) -> FolderVocabulary:
        """`size`: the head's outputs; by default as many as there are tokens."""
        tokens = _object(folder / VOCABULARY, key)
        added = folder / "added_tokens.json"
        tokens |= _object(added, key) if added.is_file() else {}
        if not all(type(i) is int for i in tokens.values()):
            raise RecipeError(
                f"{key}: {folder / VOCABULARY} is not one table of tokens and ids (a multilingual "
                "model has one for each language, which muster does not read); name a folder with one"
            )
        if min(tokens.values()) < 0 or max(tokens.values()) > LARGEST_ID:
            raise RecipeError(
                f"{key}: {folder / VOCABULARY} has the ids {min(tokens.values())} to {max(tokens.values())}, "
                f"expected 0 to {LARGEST_ID} at most; copy it again"
            )
        settings = _settings(folder, key, tokens)
        most = max(tokens.values())
        if size is not None and most >= size:
            raise RecipeError(
                f"{key}: {folder / VOCABULARY} has ids up to {most}, but the model's head only {size} "
                "outputs; copy the whole folder again"
            )
        return cls(tokens, size or most + 1, settings)

    def _encode(self, text: str) -> list[int]:
        return [self._ids[c] for c in (text.lower() if self._fold else text)]

    def _join(self, text: str) -> str:
        return " ".join(text.split())

    def _remedy_for_unknown(self) -> str:
        return (
            "train a fresh head on an alphabet of your own with data.tokenizer.kind=characters and "
            "data.tokenizer.characters"
        )


def _settings(folder: Path, key: str, tokens: Mapping[str, int]) -> TokenizerSettings:
    path = folder / SETTINGS
    found = _object(path, key) if path.is_file() else {}
    if (kind := found.get("tokenizer_class")) not in TOKENIZERS:
        raise RecipeError(
            f"{key}: {path} has tokenizer_class {in_one_line(kind)}; muster reads {TOKENIZERS[0]}, of characters. "
            "Train a fresh head with data.tokenizer.kind=characters"
        )
    named = folder / "special_tokens_map.json"
    marks = (_object(named, key) if named.is_file() else {}) | found
    special = {name: _token(marks.get(name), default) for name, default in SPECIAL.items()}
    pad = special["pad_token"]
    if pad is None or pad not in tokens:
        raise RecipeError(
            f"{key}: {folder / VOCABULARY} has no {in_one_line(pad)}, the padding token of {path.name}, which is the "
            "blank of CTC; correct it there"
        )
    return TokenizerSettings(
        special=tuple(token for token in special.values() if token is not None),
        pad=pad,
        delimiter=_token(found.get("word_delimiter_token"), DELIMITERS[0]) or DELIMITERS[0],
        fold=bool(found.get("do_lower_case", False)),
    )


def _token(value: Any, default: str) -> str | None:
    """A token is written as a string, or as a table with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else default


def _object(path: Path, key: str) -> dict[str, Any]:
    try:
        found = json_file.read(path)
        if not found:
            raise ValueError("it is empty")
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"{key}: {path} cannot be read ({in_one_line(error, 300)}); copy it again"
        ) from None
    return found


def tokenizer_files(vocabulary: Vocabulary) -> dict[str, bytes]:
    """What transformers' Wav2Vec2CTCTokenizer needs, for a vocabulary of characters."""
    saved = vocabulary.to_json()
    if saved["kind"] != "characters":
        raise MusterError(
            f"data.tokenizer.kind: {saved['kind']} has no form in transformers' CTC tokenizer, which "
            "reads characters; train with data.tokenizer.kind=characters to export"
        )
    delimiter = next((d for d in DELIMITERS if d not in vocabulary.pieces), None)
    if delimiter is None:
        raise MusterError(
            f"data.tokenizer.characters: has all of {' '.join(DELIMITERS)}, so none can stand for a "
            "space in transformers' CTC tokenizer; leave one out"
        )
    tokens = {delimiter if p == " " else p: i for i, p in enumerate(vocabulary.pieces) if p}
    settings = {
        "tokenizer_class": TOKENIZERS[0],
        "pad_token": SPECIAL["pad_token"],
        "word_delimiter_token": delimiter,
        "do_lower_case": False,
    }
    documents = {VOCABULARY: {SPECIAL["pad_token"]: vocabulary.blank} | tokens, SETTINGS: settings}
    return {
        name: (json.dumps(document, ensure_ascii=False, indent=2) + "\n").encode()
        for name, document in documents.items()
    }
