"""Tokenizers of language models: plain bytes, or a Hugging Face tokenizer.

A tokenizer also says how many bytes of the text each token stands for, so that models with
different tokenizers can be compared in bits per byte. It travels inside checkpoints as JSON.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muster.data.text import tokenizer_bounds
from muster.errors import DataError, MusterError, RecipeError, UnreadableError
from muster.reading import json_file
from muster.reading.files import expanded, is_file, read_text
from muster.reading.libraries import refused

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>")

Ids = NDArray[np.uint32]
Sizes = NDArray[np.int64]


class Tokenizer(ABC):
    """Text to ids and back. `end` closes every document and stands before the first."""

    size: int  # ids run from 0 to size - 1
    end: int

    @abstractmethod
    def encode_all(self, texts: Sequence[str]) -> list[tuple[Ids, Sizes]]:
        """Of each text: its ids, and the UTF-8 bytes each stands for, which add up to the text's.

        Without `end`. A text that has bytes but no token gives sizes that are longer than its ids
        by one, for the `end` that follows.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are no UTF-8 become U+FFFD."""

    @abstractmethod
    def encode_marked(self, text: str) -> tuple[Ids, NDArray[np.int64]]:
        """Ids of a text in which special tokens that are spelt out are themselves, such as a rendered
        chat, and the character at which each begins."""

    @property
    @abstractmethod
    def end_text(self) -> str:
        """How `end` is spelt."""

    @property
    @abstractmethod
    def special(self) -> frozenset[int]:
        """Ids that stand for no text."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]: ...

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encode_all([text])[0][0].tolist()
        return ids

    def folder(self, path: str | None, pretrained: Path | None) -> Path | None:
        """Where `choose` read it from; None where it is of no folder."""
        if path is None:
            return pretrained
        given = expanded(path)
        return given if given.is_dir() else given.parent

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> Tokenizer:
        if saved.get("kind") == "bytes":
            return Bytes()
        if saved.get("kind") == "huggingface":
            with refused("the saved tokenizer", "copy the checkpoint again", DataError):
                return HuggingFace(saved["tokenizer"], saved["end"])
        raise DataError(
            f"the saved tokenizer has kind {saved.get('kind')!r}; expected bytes or huggingface"
        )


class Bytes(Tokenizer):
    """The 256 bytes, and the end."""

    size, end = 257, 256
    end_text, special = END_NAMES[0], frozenset([256])

    def encode_all(self, texts: Sequence[str]) -> list[tuple[Ids, Sizes]]:
        encoded = [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]
        return [(ids, np.ones(len(ids), np.int64)) for ids in encoded]

    def encode_marked(self, text: str) -> tuple[Ids, NDArray[np.int64]]:
        ids, starts, place = [], [], 0
        for number, part in enumerate(text.split(self.end_text)):
            if number:
                ids.append(np.array([self.end], np.uint32))
                starts.append(np.array([place]))
                place += len(self.end_text)
            points = np.frombuffer(part.encode("utf-32-le"), "<u4")
            ids.append(np.frombuffer(part.encode(), np.uint8).astype(np.uint32))
            starts.append(np.repeat(np.arange(place, place + len(part)), utf8_widths(points)))
            place += len(part)
        return np.concatenate(ids), np.concatenate(starts)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def folder(self, path: str | None, pretrained: Path | None) -> Path | None:
        return None

    def to_json(self) -> dict[str, Any]:
        return {"kind": "bytes"}


class HuggingFace(Tokenizer):
    """A tokenizer.json. Its truncation, padding and templates are off, and special tokens spelt out
    in a text are text: a document cannot end itself."""

    def __init__(
        self,
        document: str,
        end: int,
        where: str = "the saved tokenizer",
        kind: type[MusterError] = DataError,
    ) -> None:
        import tokenizers

        self._where, self._kind = where, kind
        self._tokenizer = tokenizers.Tokenizer.from_str(document)
        tokenizer_bounds.check(self._tokenizer, where, kind)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.size, self.end = max(self._tokenizer.get_vocab().values()) + 1, end

    @classmethod
    def read(cls, path: Path, key: str) -> HuggingFace:
        """From a folder or its tokenizer.json; `key` is the recipe key that named it."""
        file = path / "tokenizer.json" if path.is_dir() else path
        if not is_file(file):
            raise RecipeError(
                f"{key}: {file} does not exist; name a Hugging Face tokenizer with "
                "data.tokenizer.path, or set data.tokenizer.kind=bytes"
            )
        document = _read_text(file, key)
        with refused(f"{key}: {file}", kind=RecipeError, problem="is no tokenizer"):
            import tokenizers

            tokenizer = tokenizers.Tokenizer.from_str(document)
        end = next(
            (
                i
                for name in _end_names(file.parent)
                if (i := tokenizer.token_to_id(name)) is not None
            ),
            None,
        )
        if end is None:
            raise RecipeError(
                f"{key}: {file} has no end-of-text token that muster knows; name it as eos_token in "
                f"{file.parent / 'tokenizer_config.json'}"
            )
        with refused(f"{key}: {file}", kind=RecipeError, problem="is no tokenizer"):
            found = cls(document, end, f"{key}: {file}", RecipeError)
            found.encode_all(["a"])  # some damage shows only then
        return found

    def encode_all(self, texts: Sequence[str]) -> list[tuple[Ids, Sizes]]:
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.array(encoding.ids, np.uint32), _sizes(text, encoding.offsets))
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def encode_marked(self, text: str) -> tuple[Ids, NDArray[np.int64]]:
        encoding = self._marked.encode(text, add_special_tokens=False)
        starts = [start for start, _ in encoding.offsets]
        return np.array(encoding.ids, np.uint32), np.array(starts, np.int64)

    @cached_property
    def _marked(self) -> Any:
        """The same tokenizer, which knows special tokens in a text."""
        from tokenizers import Tokenizer

        # Some that the library reads it writes as what it does not read, such as merges without their token.
        with refused(self._where, kind=self._kind, problem="is no tokenizer"):
            return Tokenizer.from_str(self._tokenizer.to_str())

    @property
    def end_text(self) -> str:
        return str(self._tokenizer.id_to_token(self.end))

    @cached_property
    def special(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special) | {self.end}

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def to_json(self) -> dict[str, Any]:
        return {"kind": "huggingface", "tokenizer": self._tokenizer.to_str(), "end": self.end}


def choose(kind: str, path: str | None, pretrained: Path | None) -> Tokenizer:
    """What `data.tokenizer` asks for; `pretrained` is the folder of `model.pretrained`."""
    if kind in ("characters", "subwords"):
        raise RecipeError(
            f"data.tokenizer.kind: {kind} is for speech; causal-lm takes bytes or huggingface"
        )
    if kind == "bytes":
        if path:
            raise RecipeError(
                "data.tokenizer.path: bytes need no file; set data.tokenizer.kind=huggingface, or "
                "path to null"
            )
        return Bytes()
    if path:
        return HuggingFace.read(expanded(path), "data.tokenizer.path")
    if pretrained is not None:
        return HuggingFace.read(pretrained, "model.pretrained")
    if kind == "huggingface":
        raise RecipeError(
            "data.tokenizer.path: needed for data.tokenizer.kind=huggingface: a folder, or its "
            "tokenizer.json"
        )
    return Bytes()


def check_rows(tokenizer: Tokenizer, rows: int) -> None:
    """Every id needs a row of the embedding. More rows than ids do no harm."""
    if tokenizer.size > rows:
        raise RecipeError(
            f"data.tokenizer: it has {tokenizer.size} ids, the model's embedding only {rows} rows; "
            f"take the tokenizer that belongs to the model, or set model.vocab_size to "
            f"{tokenizer.size} where the model is not pretrained"
        )


def pieces(tokenizer: Tokenizer, before: Sequence[int], ids: Iterator[int]) -> Iterator[str]:
    """The text of `ids` as they come, after `before`, each piece as soon as its characters are whole.

    A token's text can depend on its neighbour (a space that only the first word lacks), so a token
    is decoded together with the piece before it.
    """
    seen = list(before)
    start, read = max(0, len(seen) - 8), len(seen)
    for i in ids:
        seen.append(i)
        known, now = tokenizer.decode(seen[start:read]), tokenizer.decode(seen[start:])
        if len(now) > len(known) and not now.endswith("\ufffd"):
            yield now[len(known) :]
            start, read = read, len(seen)
    rest = tokenizer.decode(seen[start:])[len(tokenizer.decode(seen[start:read])) :]
    if rest:
        yield rest


def _sizes(text: str, offsets: Sequence[tuple[int, int]]) -> Sizes:
    """Bytes per token from spans of characters.

    A character that several tokens share counts with the first of them, what lies between two spans
    with the second, what follows the last span with the last.
    """
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    place = np.concatenate([[0], np.cumsum(utf8_widths(points))])
    ends = place[np.array([end for _, end in offsets] or [0])]
    ends = np.maximum.accumulate(ends)
    ends[-1] = place[-1]
    return np.diff(ends, prepend=0)[: None if offsets or len(text) else 0]


def utf8_widths(points: NDArray[np.uint32]) -> Sizes:
    """Bytes of each character."""
    return 1 + (points > 0x7F) + (points > 0x7FF).astype(np.int64) + (points > 0xFFFF)


def _read_text(file: Path, key: str) -> str:
    try:
        return read_text(file, json_file.MOST_TOKENIZER)
    except (OSError, UnreadableError) as error:
        raise RecipeError(f"{key}: {error}") from None


def _end_names(folder: Path) -> Iterator[str]:
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            found = json_file.read(folder / file)
        except (OSError, ValueError):
            continue
        name = found.get("eos_token")
        name = name.get("content") if isinstance(name, dict) else name
        if isinstance(name, str):
            yield name
    yield from END_NAMES
