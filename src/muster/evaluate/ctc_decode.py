"""From CTC outputs to label sequences: the best path, and prefix-beam search.

The best path takes the likeliest symbol of each frame. The likeliest *labelling* is another
matter, for many alignments collapse to one labelling and their probabilities add up; prefix-beam
search adds them (Hannun et al. 2014, "First-Pass Large Vocabulary Continuous Speech Recognition
using Bi-Directional Recurrent DNNs"), and can ask a language model at each word's end.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from muster.errors import MusterError
from muster.evaluate.ngram import END, START, NGram

_NEVER = -math.inf
_LN10 = math.log(10.0)


def greedy(logits: Tensor, lengths: Tensor, blank: int = 0) -> list[list[int]]:
    """Best path of each clip: repeats collapsed, then blanks dropped.

    `logits` [batch, time, vocab], of any scale that keeps the order; `lengths` [batch] frames.
    """
    best = logits.argmax(dim=-1)
    frames = torch.arange(best.shape[1], device=best.device)
    keep = (frames < lengths.to(best.device)[:, None]) & (best != blank)
    keep[:, 1:] &= best[:, 1:] != best[:, :-1]
    ids = iter(best[keep].tolist())
    return [list(islice(ids, count)) for count in keep.sum(dim=1).tolist()]


class _Prefix:
    """A node of the tree of labellings: one object per labelling, so merging is identity."""

    __slots__ = ("children", "context", "extra", "parent", "token", "word")

    def __init__(
        self, parent: _Prefix | None, token: int, word: str, context: tuple[str, ...], extra: float
    ) -> None:
        self.parent = parent
        self.token = token
        self.word = word  # letters since the last space
        self.context = context  # finished words the language model still looks at
        self.extra = extra  # natural log: language model and bonuses of the finished words
        self.children: dict[int, _Prefix] = {}

    def remove(self) -> None:
        """Remove it from the tree, unless it is a prefix of others."""
        if self.parent is not None and not self.children:
            del self.parent.children[self.token]

    def ids(self) -> list[int]:
        node, ids = self, []
        while node.parent is not None:
            ids.append(node.token)
            node = node.parent
        return ids[::-1]


# Per prefix: ln p of the alignments so far that end in blank, and in the prefix's last symbol.
_Beam = dict[_Prefix, list[float]]


class _Words:
    """What finished words add to a prefix's score."""

    def __init__(
        self,
        pieces: Sequence[str] | None,
        lm: NGram | None,
        lm_weight: float,
        word_bonus: float,
        known_words: bool,
    ) -> None:
        self.pieces = pieces
        self.lm = lm
        self.weight = lm_weight * _LN10
        self.bonus = word_bonus
        self.beginnings = lm.beginnings if lm is not None and known_words else None

    def root(self) -> _Prefix:
        return _Prefix(None, -1, "", self._shorten((START,)), 0.0)

    def child(self, prefix: _Prefix, token: int) -> _Prefix:
        found = prefix.children.get(token)
        if found is None:
            word, context, extra = prefix.word, prefix.context, prefix.extra
            if self.pieces is not None:
                *finished, word = (word + self.pieces[token]).split(" ")
                for one in finished:
                    context, extra = self._finish(one, context, extra)
                if self.beginnings is not None and word not in self.beginnings:
                    extra = _NEVER
            found = prefix.children[token] = _Prefix(prefix, token, word, context, extra)
        return found

    def final(self, prefix: _Prefix) -> float:
        """`extra` once the last word and the sentence have ended."""
        context, extra = self._finish(prefix.word, prefix.context, prefix.extra)
        return extra if self.lm is None else extra + self.weight * self.lm.score(END, context)

    def _finish(
        self, word: str, context: tuple[str, ...], extra: float
    ) -> tuple[tuple[str, ...], float]:
        if not word:
            return context, extra
        if self.beginnings is not None and word not in self.lm:  # type: ignore[operator]
            return context, _NEVER
        extra += self.bonus
        if self.lm is not None:
            extra += self.weight * self.lm.score(word, context)
            context = self._shorten((*context, word))
        return context, extra

    def _shorten(self, context: tuple[str, ...]) -> tuple[str, ...]:
        keep = 0 if self.lm is None else self.lm.order - 1
        return context[len(context) - keep :] if keep < len(context) else context


def prefix_beam(
    log_probs: Tensor,
    width: int,
    *,
    pieces: Sequence[str] | None = None,
    lm: NGram | None = None,
    lm_weight: float = 0.5,
    word_bonus: float = 0.0,
    known_words: bool = False,
    min_log_prob: float = -10.0,
    max_symbols: int = 40,
    blank: int = 0,
) -> list[tuple[list[int], float]]:
    """The likeliest labellings of one clip, best first: at most `width` of (ids, score).

    `log_probs` [time, vocab], natural logarithms of a softmax, padding cut off. The score is
    ln p(labelling | audio) + lm_weight · ln p(words) + word_bonus · words, exact where nothing is
    pruned.

    `pieces[id]` is the text of each id, words parted by spaces; needed for `lm` and `word_bonus`.
    `min_log_prob` and `max_symbols` skip a frame's unlikely symbols, never its likeliest; the
    second bounds the time an untrained model takes, whose symbols are all alike. A language model
    favours short outputs, for each word costs; a positive `word_bonus` pays some of it back.
    `known_words` follows only spellings of words that `lm` knows, which saves a small acoustic
    model most of its spelling mistakes.
    """
    if width < 1 or max_symbols < 1:
        raise ValueError(f"width={width} and max_symbols={max_symbols} must be at least 1")
    if pieces is None and (lm is not None or word_bonus):
        raise ValueError(
            "lm and word_bonus count words, which takes the text of each id: pass pieces"
        )
    words = _Words(pieces, lm, lm_weight, word_bonus, known_words)
    beam: _Beam = {words.root(): [0.0, _NEVER]}
    for frame in _likely_symbols(log_probs, min_log_prob, max_symbols):
        grown = _advance(beam, frame, words, blank)
        kept = heapq.nlargest(width, grown.items(), key=lambda x: _add(*x[1]) + x[0].extra)
        beam = {prefix: ends for prefix, ends in kept if prefix.extra > _NEVER} or beam
        for prefix in grown.keys() - beam.keys():
            prefix.remove()
    scored = [(prefix.ids(), _add(*ends) + words.final(prefix)) for prefix, ends in beam.items()]
    return sorted(scored, key=lambda x: -x[1])


def _advance(beam: _Beam, frame: list[tuple[int, float]], words: _Words, blank: int) -> _Beam:
    """Every prefix the beam can reach with one more frame. Written out flat: it is the hot loop."""
    grown: _Beam = {}
    for prefix, (in_blank, in_symbol) in beam.items():
        either = _add(in_blank, in_symbol)
        for token, log_prob in frame:
            if token == blank:
                ends = grown.setdefault(prefix, [_NEVER, _NEVER])
                ends[0] = either + log_prob
                continue
            reach = either
            if token == prefix.token:
                # The same symbol again only prolongs it; a second one takes a blank between.
                if in_symbol > _NEVER:
                    ends = grown.setdefault(prefix, [_NEVER, _NEVER])
                    ends[1] = _add(ends[1], in_symbol + log_prob)
                reach = in_blank
            if reach > _NEVER:
                child = prefix.children.get(token) or words.child(prefix, token)
                ends = grown.setdefault(child, [_NEVER, _NEVER])
                ends[1] = _add(ends[1], reach + log_prob)
    return grown


def _likely_symbols(
    log_probs: Tensor, min_log_prob: float, max_symbols: int
) -> list[list[tuple[int, float]]]:
    """Per frame, the (id, log-probability) worth following, likeliest first; at least one."""
    values, tokens = (
        log_probs.detach()
        .to("cpu", torch.float64)
        .topk(min(max_symbols, log_probs.shape[1]), dim=1)
    )
    broken = (~torch.isfinite(values[:, 0])).nonzero()
    if len(broken):
        raise MusterError(
            f"Frame {int(broken[0])} has no finite log-probability, so there is nothing to decode: "
            "the model's output overflowed or the model diverged. Check the loss of the run, and "
            "try training.precision=fp32."
        )
    counts = ((values >= min_log_prob) & (values > _NEVER)).sum(dim=1).clamp(min=1).tolist()
    rows = zip(tokens.tolist(), values.tolist(), counts, strict=True)
    return [list(zip(ids[:n], likely[:n], strict=True)) for ids, likely, n in rows]


def _add(a: float, b: float) -> float:
    """ln(e^a + e^b)."""
    if a < b:
        a, b = b, a
    return a if b == _NEVER else a + math.log1p(math.exp(b - a))
