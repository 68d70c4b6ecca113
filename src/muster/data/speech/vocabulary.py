"""Transcripts and the symbols a CTC model emits.

Id 0 is the CTC blank in every vocabulary of muster's own; the symbols follow from 1. A vocabulary
travels inside checkpoints as JSON, so what was learned from the training text is never learned a
second time.
"""

from __future__ import annotations

import json
import unicodedata
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from muster.errors import DataError, RecipeError
from muster.reading.text import in_one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_CHARACTERS = "abcdefghijklmnopqrstuvwxyz' "
BLANK = 0
WORD_MARK = "▁"

# Before NFKC, which would turn the acute accent into a space and a combining mark.
_APOSTROPHES = str.maketrans(dict.fromkeys("‘’‛ʼ´`", "'"))

Unknown = dict[str, tuple[int, int]]
"""Character -> (how often, the first row that has it)."""


def normalise(text: str, lowercase: bool) -> str:
    """One spelling per sentence: NFKC, straight apostrophes, single spaces, no outer spaces."""
    text = unicodedata.normalize("NFKC", text.translate(_APOSTROPHES))
    if lowercase:
        # Lowering can undo the normal form: J and a caron are two characters, ǰ is one.
        text = unicodedata.normalize("NFKC", text.lower())
    return " ".join(text.split())


class Vocabulary(ABC):
    """Text to ids and back.

    `pieces[id]` is the text an id stands for, a word break written as a space whatever the kind,
    so that the concatenated pieces of a label sequence are its transcript. `pieces[blank]` is
    empty.
    """

    blank = BLANK
    pieces: tuple[str, ...]
    alphabet: frozenset[str]

    @property
    def size(self) -> int:
        """Outputs the model needs, the blank included."""
        return len(self.pieces)

    def encode(self, text: str, drop: bool = False) -> list[int]:
        """Ids of normalised text. Characters outside the alphabet are refused or dropped."""
        unknown = self.find_unknown([text])
        if unknown:
            if not drop:
                listed = ", ".join(map(_describe, unknown))
                raise DataError(
                    f"{text[:80]!r} cannot be spelt with the vocabulary, which lacks {listed}. "
                    + self.remedies(unknown)
                )
            text = " ".join("".join(c for c in text if c not in unknown).split())
        return self._encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids that are already collapsed and free of blanks."""
        for i in ids:
            if not 0 <= i < self.size or i == self.blank:
                raise ValueError(
                    f"id {i} is no symbol: expected 0 to {self.size - 1} without the blank, {self.blank}"
                )
        return self._join("".join(self.pieces[i] for i in ids))

    def find_unknown(self, texts: Iterable[str]) -> Unknown:
        """Characters that cannot be encoded, in the order met; rows are counted from 0."""
        found: Unknown = {}
        for row, text in enumerate(texts):
            if self.alphabet.issuperset(text):
                continue
            for character in text:
                if character not in self.alphabet:
                    count, first = found.get(character, (0, row))
                    found[character] = (count + 1, first)
        return found

    def remedies(self, unknown: Iterable[str]) -> str:
        """What a user can do about the characters that `find_unknown` found, as a sentence."""
        remedies = [
            self._remedy_for_unknown(),
            "leave such characters out with data.unknown_characters=drop",
        ]
        if any(self.alphabet.issuperset(character.lower()) for character in unknown):
            remedies.insert(0, "set data.lowercase=true, which makes capitals known")
        return f"Either {', or '.join(remedies)}."

    @abstractmethod
    def to_json(self) -> dict[str, Any]: ...

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> Vocabulary:
        """The vocabulary that `to_json` described, of any kind."""
        kind = saved.get("kind")
        try:
            if kind == "characters":
                return Characters(saved["characters"])
            if kind == "subwords":
                return Subwords(saved["units"], [(a, b) for a, b in saved["merges"]])
            if kind == "folder":
                from muster.data.speech.ctc_tokenizer import FolderVocabulary

                return FolderVocabulary.read_json(saved)
        except Exception as error:  # tokenizers raises no narrower one
            raise DataError(
                f"The saved vocabulary of kind {kind!r} is damaged: {in_one_line(repr(error))}."
            ) from None
        raise DataError(
            f"The saved vocabulary has kind {kind!r}; expected characters, subwords or folder."
        )

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def _remedy_for_unknown(self) -> str: ...

    def _join(self, text: str) -> str:
        return text


class Characters(Vocabulary):
    """One symbol per character of an alphabet, in the alphabet's order."""

    def __init__(self, characters: str = DEFAULT_CHARACTERS) -> None:
        repeated = sorted(c for c, count in Counter(characters).items() if count > 1)
        if repeated or not characters:
            problem = f"names {', '.join(map(repr, repeated))} twice" if repeated else "is empty"
            raise DataError(
                f"data.tokenizer.characters {problem}: write each character of the alphabet once."
            )
        self.characters = characters
        self.pieces = ("", *characters)
        self.alphabet = frozenset(characters)
        self._ids = {character: i for i, character in enumerate(self.pieces)}

    def to_json(self) -> dict[str, Any]:
        return {"kind": "characters", "characters": self.characters}

    def _encode(self, text: str) -> list[int]:
        return [self._ids[character] for character in text]

    def _remedy_for_unknown(self) -> str:
        return "add what belongs there to data.tokenizer.characters"


class Subwords(Vocabulary):
    """Byte-pair units; a unit that begins a word carries the mark '▁', as in sentencepiece.

    `units` are the symbols from id 1 on, `merges` the pairs of units joined, in order. A unit
    never crosses a space, and runs of spaces count as one.
    """

    def __init__(self, units: Sequence[str], merges: Sequence[tuple[str, str]]) -> None:
        self.units = tuple(units)
        self.merges = tuple(merges)
        self.pieces = ("", *(unit.replace(WORD_MARK, " ") for unit in self.units))
        self.alphabet = frozenset("".join(self.pieces)) | {" "}
        self._tokenizer = _byte_pair_tokenizer(self.units, self.merges)

    @classmethod
    def learn(cls, texts: Iterable[str], vocabulary_size: int) -> Subwords:
        """At most `vocabulary_size` symbols, the blank included; the same texts, the same units.

        Fewer when the texts hold no further pair that occurs twice: a unit seen once teaches
        nothing.
        """
        from tokenizers import trainers

        marked = [_mark(text) for text in texts]
        alphabet = set().union(*marked)
        if not alphabet:
            raise DataError(
                "There is no text to learn subwords from: every transcript is empty. "
                "Check data.text_column."
            )
        if vocabulary_size < len(alphabet) + 1:
            raise DataError(
                f"data.tokenizer.vocabulary_size={vocabulary_size} is too small: the blank and the "
                f"{len(alphabet)} characters of the training text alone need {len(alphabet) + 1}. "
                "Set it higher, or have fewer characters with data.lowercase=true."
            )
        tokenizer = _byte_pair_tokenizer((), ())
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary_size - 1, min_frequency=2, show_progress=False, special_tokens=[]
        )
        tokenizer.train_from_iterator(marked, trainer)
        learned = json.loads(tokenizer.to_str())["model"]
        units = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
        return cls(units, [(a, b) for a, b in learned["merges"]])

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "subwords",
            "units": list(self.units),
            "merges": [list(pair) for pair in self.merges],
        }

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(_mark(text)).ids
        return [i + 1 for i in ids]

    def _join(self, text: str) -> str:
        return text.removeprefix(" ")

    def _remedy_for_unknown(self) -> str:
        return (
            "add training text that has what belongs there (subwords know the characters they were "
            "learned from), or list it with data.tokenizer.kind=characters and "
            "data.tokenizer.characters"
        )


def symbol_kind(asked: str) -> str:
    """What `data.tokenizer.kind` means for CTC."""
    kind = "characters" if asked == "auto" else asked
    if kind not in ("characters", "subwords"):
        raise RecipeError(
            f"data.tokenizer.kind: {kind} is for language models; speech-ctc takes "
            "characters or subwords"
        )
    return kind


def build_vocabulary(
    kind: str, characters: str, vocabulary_size: int, texts: Iterable[str]
) -> Vocabulary:
    """What `data.tokenizer` asks for; `texts`, normalised, are read only for subwords."""
    if kind == "subwords":
        return Subwords.learn(texts, vocabulary_size)
    return Characters(characters)


def _mark(text: str) -> str:
    return "".join(WORD_MARK + word for word in text.split())


def _byte_pair_tokenizer(units: Sequence[str], merges: Sequence[tuple[str, str]]) -> Tokenizer:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.BPE(vocab={unit: i for i, unit in enumerate(units)}, merges=list(merges))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(WORD_MARK, "merged_with_next")
    return tokenizer


def _describe(character: str) -> str:
    return f"{character!r} (U+{ord(character):04X} {unicodedata.name(character, 'unnamed')})"
