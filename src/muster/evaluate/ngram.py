"""A word n-gram language model: read from an ARPA file, or made from text.

Meant for the models a transcript corpus gives: everything lies in one dictionary, about 300 bytes
an n-gram. Probabilities are base-10 logarithms, as in the files.
"""

from __future__ import annotations

import gzip
import math
import re
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from muster.errors import DataError

START, END, UNKNOWN = "<s>", "</s>", "<unk>"

_NOT_PREDICTED = -99.0  # how ARPA files write the probability of <s>
_MISSING_UNKNOWN = -100.0  # a word outside a model that has no <unk>; KenLM's choice too

Words = tuple[str, ...]


class NGram:
    """A back-off model: `entries[words]` is (log10 probability, log10 back-off weight).

    The weight is what falls to the shorter context when these words are a context and the next
    word was not seen after them.
    """

    def __init__(self, order: int, entries: dict[Words, tuple[float, float]]) -> None:
        self.order = order
        self.entries = entries

    def __contains__(self, word: str) -> bool:
        return (word,) in self.entries

    @cached_property
    def beginnings(self) -> frozenset[str]:
        """Every beginning of a known word, the empty one and the whole word included."""
        return frozenset(word[:end] for word in self.vocabulary for end in range(len(word) + 1))

    def score(self, word: str, context: Sequence[str] = ()) -> float:
        """log10 p(word | context), `context` the words before it, `<s>` first in a sentence.

        Only the last `order - 1` words of the context count. Words outside the vocabulary, on
        either side, are `<unk>`.
        """
        known = context[len(context) - self.order + 1 :] if len(context) >= self.order else context
        words = tuple(w if w in self else UNKNOWN for w in (*known, word))
        backed_off = 0.0
        while words:
            entry = self.entries.get(words)
            if entry is not None:
                return backed_off + entry[0]
            backed_off += self.entries.get(words[:-1], (0.0, 0.0))[1]
            words = words[1:]
        return backed_off + _MISSING_UNKNOWN

    @property
    def vocabulary(self) -> list[str]:
        """Every word that can be predicted: all but `<s>`."""
        return [words[0] for words in self.entries if len(words) == 1 and words[0] != START]

    def to_json(self) -> dict[str, Any]:
        return {"order": self.order, "entries": [[*e, *words] for words, e in self.entries.items()]}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> NGram:
        entries = {tuple(words): (p, backoff) for p, backoff, *words in saved["entries"]}
        return cls(saved["order"], entries)


def build(texts: Iterable[str], order: int) -> NGram:
    """A model of the words of `texts`, one sentence each, with interpolated Witten–Bell smoothing.

    p(w | h) = (count(h w) + kinds(h) · p(w | h')) / (count(h) + kinds(h)), where kinds(h) is how
    many different words followed h and h' is h without its first word. Below the single words
    lies the uniform distribution over the vocabulary, `</s>` and `<unk>` included; so unseen words
    have a probability, and for every h the sum is 1. Chosen over Kneser–Ney, whose discounts are
    undefined on the small texts this is often given.
    """
    if order < 1:
        raise DataError(f"An n-gram model of order {order} does not exist: use 1 or more.")
    counts = _count(texts, order)
    vocabulary = sorted({*counts[()], UNKNOWN})
    probs: dict[Words, float] = {}
    weights: dict[Words, float] = {}
    for context in sorted(counts, key=len):
        following = counts[context]
        seen, kinds = sum(following.values()), len(following)
        weights[context] = kinds / (seen + kinds)
        for word in following if context else vocabulary:
            lower = probs[(*context[1:], word)] if context else 1.0 / len(vocabulary)
            probs[(*context, word)] = (following[word] + kinds * lower) / (seen + kinds)
    probs[(START,)] = 10.0**_NOT_PREDICTED
    entries = {
        words: (math.log10(p), math.log10(weights.get(words, 1.0))) for words, p in probs.items()
    }
    return NGram(max(map(len, entries)), entries)


def _count(texts: Iterable[str], order: int) -> dict[Words, Counter[str]]:
    """Context -> what followed it, for contexts of up to `order - 1` words."""
    counts: defaultdict[Words, Counter[str]] = defaultdict(Counter)
    for row, text in enumerate(texts):
        words = text.split()
        if START in words or END in words:
            raise DataError(
                f"Row {row} of the text contains {START} or {END}, which mark the ends of "
                "sentences and are added by muster: remove them."
            )
        if not words:
            continue
        sentence = (START, *words, END)
        for end in range(1, len(sentence)):
            for length in range(min(order, end + 1)):
                counts[sentence[end - length : end]][sentence[end]] += 1
    if not counts:
        raise DataError("There is no text to build an n-gram model from: every row is empty.")
    return counts


def read_arpa(path: str | Path) -> NGram:
    """The model in an ARPA file, plain or gzip-compressed (detected by content)."""
    try:
        with Path(path).open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            return _Reader(path, gzip.open(raw) if packed else raw).read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"The language model {path} cannot be read ({error}): point evaluation.ngram at a "
            "whole ARPA file, plain or .gz."
        ) from error


class _Reader:
    """Parses an ARPA file line by line, with line numbers in errors.

    Bytes are split before they are decoded: a word may hold a no-break space, which `str.split`
    would take for a gap.
    """

    def __init__(self, path: str | Path, lines: Iterable[bytes]) -> None:
        self.path = path
        self.number = 0
        self.lines = self._filled(lines)
        self.entries: dict[Words, tuple[float, float]] = {}

    def _filled(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        for self.number, line in enumerate(lines, 1):
            if line := line.strip():
                yield line

    def read(self) -> NGram:
        if not any(line == b"\\data\\" for line in self.lines):
            raise self.error("there is no \\data\\ line, so this is no ARPA file")
        sizes: list[int] = []
        line = self.next()
        while line.startswith(b"ngram "):
            sizes.append(self.size(line, len(sizes) + 1))
            line = self.next()
        if not sizes:
            raise self.error(f"expected 'ngram 1=COUNT' after \\data\\, found {_show(line)}")
        for n, size in enumerate(sizes, 1):
            if line != b"\\%d-grams:" % n:
                raise self.error(f"expected \\{n}-grams:, found {_show(line)}")
            before = len(self.entries)
            while not (line := self.next()).startswith(b"\\"):
                self.entry(line, n)
            if len(self.entries) - before != size:
                raise self.error(
                    f"the header says {size} {n}-grams, the file has {len(self.entries) - before}"
                )
        if line != b"\\end\\":
            raise self.error(f"expected \\end\\, found {_show(line)}")
        return NGram(len(sizes), self.entries)

    def next(self) -> bytes:
        for line in self.lines:
            return line
        raise self.error("the file ends before \\end\\; it was cut short")

    def size(self, line: bytes, n: int) -> int:
        match = re.fullmatch(rb"ngram\s+(\d+)\s*=\s*(\d+)", line)
        if match is None or int(match[1]) != n:
            raise self.error(f"expected 'ngram {n}=COUNT', found {_show(line)}")
        return int(match[2])

    def entry(self, line: bytes, n: int) -> None:
        fields = line.split()
        if len(fields) not in (n + 1, n + 2):
            raise self.error(
                f"expected a log10 probability, {n} word(s) and at most a back-off weight, "
                f"found {len(fields)} fields: {_show(line)}"
            )
        log_prob = self.number_in(fields[0], line)
        if log_prob > 0.0:
            raise self.error(f"a log10 probability cannot be above 0: {_show(line)}")
        weight = self.number_in(fields[n + 1], line) if len(fields) == n + 2 else 0.0
        try:
            words = tuple(_intern(word) for word in fields[1 : n + 1])
        except UnicodeDecodeError as error:
            raise self.error(f"not UTF-8: {_show(line)}") from error
        if words in self.entries:
            raise self.error(f"this n-gram is in the file twice: {_show(line)}")
        self.entries[words] = (log_prob, weight)

    def number_in(self, field: bytes, line: bytes) -> float:
        try:
            value = float(field)
        except ValueError:
            value = math.nan
        if math.isnan(value):
            raise self.error(f"{_show(field)} is not a number: {_show(line)}")
        return value

    def error(self, problem: str) -> DataError:
        return DataError(f"{self.path}, line {self.number}: {problem}.")


def _intern(word: bytes) -> str:
    """One object per spelling, since a word is in many n-grams. Some tools write <UNK>."""
    return UNKNOWN if word == b"<UNK>" else sys.intern(word.decode())


def _show(line: bytes) -> str:
    return repr(line[:80].decode(errors="replace"))
