"""Samples of a split that are in the training data too: a score on them says little.

A source takes part with a method `overlap(train)`, which compares it with the training source and says what
was found; one without it is not checked, and its data are not called unseen.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from muster.data.loader import Source

NAMED = 3  # pairs
MOST_TOKENS = 200_000_000  # of training text that is compared: some ten seconds
TEXT_VERSION = 2  # of what `text_overlap` finds
PIECE_BYTES = 200  # of text that is looked for as a whole
SHORTEST, LONGEST = 32, 256  # such a piece, in tokens
CHUNK = 1 << 20
PRIME = 0x9E3779B97F4A7C15  # odd, so that its powers have inverses modulo 2^64
INVERSE = pow(PRIME, -1, 1 << 64)
FILTER_BITS = 22

Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class Overlap:
    """What of a split is in the training data too."""

    what: str  # audio, text, images
    seen: int
    total: int
    unit: str  # clips, tokens, images
    first: list[str] = field(default_factory=list)  # pairs by name
    unchecked: str = ""  # why nothing, or not all, was compared
    decisive: bool = True  # False: it may well be so, like one sentence read by two speakers

    def words(self, split: str) -> str:
        if not self.total:
            return f"{split}: {self.what} not compared with the training data: {self.unchecked}"
        share = f"{self.seen / self.total:.1%} ({self.seen:,} of {self.total:,} {self.unit})"
        told = f"{split}: {share} share their {self.what} with the training data"
        if self.unit == "tokens":
            told = f"{split}: {share} are in text that is in the training data too"
        if self.seen == 0:
            told = f"{split}: none of {self.total:,} {self.unit} are in the training data, by {self.what}"
        if self.first:
            told += f": {'; '.join(self.first)}{' …' if self.seen > len(self.first) else ''}"
        if self.unchecked:
            told += f"; {self.unchecked}"
        return f"warning: {told}" if self.seen and self.decisive else told


def find_overlap(source: Source, train: Source) -> list[Overlap]:
    """With each of the corpora that the training data were mixed of."""
    if several := getattr(train, "sources", None):
        return [found for part in several for found in find_overlap(source, part)]
    if compare := getattr(source, "overlap", None):
        return list(compare(train))
    return [Overlap("samples", 0, 0, "samples", unchecked="their source has no method `overlap`")]


def unseen(found: Sequence[Overlap]) -> bool:
    """Whether everything that decides was compared, and nothing of it was found."""
    decisive = [part for part in found if part.decisive]
    return bool(decisive) and not any(part.seen or part.unchecked for part in decisive)


def pairs(mine: Mapping[int, Hashable], theirs: Mapping[int, Hashable]) -> dict[int, int]:
    """For each sample of mine whose key is one of theirs, the first of those."""
    wanted = set(mine.values())
    first: dict[Hashable, int] = {}
    for index, key in theirs.items():
        if key in wanted:
            first.setdefault(key, index)
    return {index: first[key] for index, key in mine.items() if key in first}


def named_pairs(found: Mapping[int, int], source: Any, train: Any) -> list[str]:
    return [f"{source.name(i)} is {train.name(j)}" for i, j in list(found.items())[:NAMED]]


@dataclass(frozen=True)
class Documents:
    """Text as tokens: document `i` is `tokens[bounds[i] : bounds[i + 1]]`."""

    tokens: NDArray[Any]
    bounds: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.bounds)


def text_key() -> str:
    """What an answer of `text_overlap` depends on besides the texts: part of the name it is saved under."""
    return f"{TEXT_VERSION}-{PIECE_BYTES}-{SHORTEST}-{LONGEST}-{MOST_TOKENS}"


def text_overlap(mine: Documents, theirs: Documents, bytes_per_token: float) -> Overlap:
    """Tokens of `mine` in pieces of about `PIECE_BYTES` that occur anywhere in `theirs`. The last piece of a
    document ends with it; a document that is shorter than a piece has to be a whole document there."""
    size = int(np.clip(PIECE_BYTES / max(bytes_per_token, 1e-9), SHORTEST, LONGEST))
    long = mine.lengths >= size
    starts, counts = _pieces(mine.bounds[:-1][long], mine.lengths[long], size)
    pieces, whole = hashes_at(mine.tokens, starts, size), _document_hashes(mine, size)
    compared = int(np.searchsorted(theirs.bounds, MOST_TOKENS, side="right")) - 1
    part = Documents(theirs.tokens, theirs.bounds[: max(compared, 1) + 1])
    found = _occurring(pieces, part, size)
    same = np.isin(whole, _document_hashes(part, size))
    seen = int(counts[found].sum()) + int(mine.lengths[~long][same].sum())
    left = len(theirs.bounds) - len(part.bounds)
    why = f"compared with the first {part.bounds[-1]:,} training tokens only" if left else ""
    return Overlap("text", seen, int(mine.lengths.sum()), "tokens", unchecked=why)


def _pieces(
    begins: NDArray[np.int64], lengths: NDArray[np.int64], size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the pieces of documents start, and how many tokens each adds to those before it: the last one
    overlaps the one before where the length is no multiple of `size`."""
    numbers = -(-lengths // size)
    which = np.repeat(np.arange(len(lengths)), numbers)
    within = (np.arange(len(which)) - np.repeat(np.cumsum(numbers) - numbers, numbers)) * size
    counts = np.minimum(size, lengths[which] - within)
    return begins[which] + np.minimum(within, lengths[which] - size), counts


def _document_hashes(documents: Documents, size: int) -> Hashes:
    """Of the documents shorter than a piece."""
    short = np.flatnonzero(documents.lengths < size)
    found = np.zeros(len(short), np.uint64)
    for length in np.unique(documents.lengths[short]):
        mask = documents.lengths[short] == length
        starts = documents.bounds[:-1][short[mask]]
        found[mask] = hashes_at(documents.tokens, starts, int(length)) + np.uint64(length)
    return found


def hashes_at(tokens: NDArray[Any], starts: NDArray[np.int64], size: int) -> Hashes:
    """Σ m(token i) · PRIME^i modulo 2^64 over `size` tokens from each start."""
    powers = _powers(PRIME, max(size, 1))[:size]
    found = np.zeros(len(starts), np.uint64)
    step = max(1, CHUNK // max(size, 1))
    for first in range(0, len(starts), step):
        places = starts[first : first + step, None] + np.arange(size)
        found[first : first + step] = (_mixed(tokens[places]) * powers).sum(1, dtype=np.uint64)
    return found


def _occurring(pieces: Hashes, theirs: Documents, size: int) -> NDArray[np.bool_]:
    """Which pieces occur at any place of their tokens: a rolling hash, with a table in front."""
    table = np.zeros(1 << FILTER_BITS, bool)
    shift = np.uint64(64 - FILTER_BITS)
    table[pieces >> shift] = True
    powers, inverses = _powers(PRIME, CHUNK + size), _powers(INVERSE, CHUNK + size)
    met: list[Hashes] = []
    begin, end = int(theirs.bounds[0]), int(theirs.bounds[-1])
    for first in range(begin, max(begin, end - size + 1), CHUNK):
        part = _mixed(theirs.tokens[first : min(end, first + CHUNK + size - 1)])
        sums = np.zeros(len(part) + 1, np.uint64)
        np.cumsum(part * powers[: len(part)], dtype=np.uint64, out=sums[1:])
        rolled = (sums[size:] - sums[:-size]) * inverses[: len(sums) - size]
        met.append(rolled[table[rolled >> shift]])
    return np.isin(pieces, np.concatenate([np.zeros(0, np.uint64), *met]))


def _powers(base: int, count: int) -> Hashes:
    """base^0, base^1 … modulo 2^64."""
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _mixed(tokens: NDArray[Any]) -> Hashes:
    """A 64-bit number per token (the finaliser of SplitMix64): neighbours in number have nothing in common."""
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
