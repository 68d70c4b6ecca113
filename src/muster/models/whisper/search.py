"""Greedy and beam search with Whisper's rules, batched: no row of a batch changes another's."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

FIRST_SECOND = 50  # timestamps of 20 ms: the first one is at most this far in
NEVER = -1e9  # a finite score below all real ones


@dataclass(frozen=True)
class Search:
    """Options of the search for the continuation of a prompt.

    `any_rank` is called once per step, with whether this process has unfinished rows, and returns
    whether to continue: where a forward pass has collectives, all ranks make equally many.
    """

    end: int  # the token that ends a text; those below it are text
    limit: int  # the most new tokens
    beams: int = 1
    suppress: tuple[int, ...] = ()
    suppress_first: tuple[int, ...] = ()  # not as the first new token
    ctc_weight: float = 0.0  # of a CTC head's scores, of which the decoder's have the rest
    first_timestamp: int | None = None  # the token <|0.00|>; Whisper's rules for timestamps hold
    any_rank: Callable[[bool], bool] = bool


class CachedDecoder(Protocol):
    """A decoder with a key-value cache."""

    def next(self, tokens: Tensor) -> Tensor:
        """Logits [rows, vocab], float32, of what follows `tokens` [rows, time] and all before; with a
        `ctc_weight`, sums of log-probabilities."""
        ...

    def select(self, rows: Tensor) -> None:
        """Reorder the cache to `rows`."""
        ...


@torch.no_grad()
def generate(search: Search, prompt: Tensor, decoder: CachedDecoder, positions: int) -> Tensor:
    """New tokens [batch, new], at most as many as fit into `positions` after the prompt."""
    limit = min(search.limit, positions - prompt.shape[1])
    if limit < 1:
        raise ValueError(
            f"no position left for a new token: limit {search.limit}, {positions} positions"
        )
    decode = _beam if search.beams > 1 else _greedy
    with _uncompiled():
        return decode(search, prompt, decoder, limit)


def _greedy(search: Search, tokens: Tensor, decoder: CachedDecoder, limit: int) -> Tensor:
    generated = tokens[:, :0]
    ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    for step in range(limit):
        choice = apply_rules(search, decoder.next(tokens), generated).argmax(1)
        tokens = choice.masked_fill(ended, search.end)[:, None]
        generated = torch.cat([generated, tokens], 1)
        ended = ended | (tokens[:, 0] == search.end)
        if step + 1 < limit and not search.any_rank(not bool(ended.all())):
            break
    return generated


def _beam(search: Search, tokens: Tensor, decoder: CachedDecoder, limit: int) -> Tensor:
    beams = _Beams(search, len(tokens), limit, tokens.device)
    logits = decoder.next(tokens).repeat_interleave(search.beams, 0)
    decoder.select(torch.arange(len(tokens), device=tokens.device).repeat_interleave(search.beams))
    while True:
        scores = logits if search.ctc_weight else logits.log_softmax(1)
        decoder.select(beams.step(scores))
        if beams.length == limit or not search.any_rank(bool(beams.active.any())):
            return beams.done[:, 0, : beams.length]
        logits = decoder.next(beams.running[..., beams.length - 1].reshape(-1, 1))


class _Beams:
    """The hypotheses of every row: `beams` unfinished ones and the `beams` best finished ones.

    A score is the sum of log-probabilities; of what has ended, their mean. A row ends when its best
    unfinished beam, at its current mean, is not better than the worst finished one.
    """

    def __init__(self, search: Search, batch: int, limit: int, device: torch.device) -> None:
        self.search, self.batch, self.limit, self.length = search, batch, limit, 0
        shape = (batch, search.beams)
        self.running = torch.full((*shape, limit), search.end, device=device)
        self.score = torch.zeros(shape, device=device)
        self.score[:, 1:] = NEVER  # all begin equal: only one of them counts
        self.done, self.done_score = self.running, torch.full(shape, NEVER, device=device)
        self.is_done = torch.zeros(shape, dtype=torch.bool, device=device)
        self.active = torch.ones((batch, 1), dtype=torch.bool, device=device)

    def step(self, log_probs: Tensor) -> Tensor:
        """Append one token, given [batch · beams, vocab]; returns the cache rows, [batch · beams]."""
        count, vocab = self.search.beams, log_probs.shape[1]
        generated = self.running[..., : self.length].flatten(0, 1)
        total = (
            apply_rules(self.search, log_probs, generated).unflatten(0, (-1, count))
            + self.score[..., None]
        )
        score, index = total.flatten(1).topk(2 * count)  # at most half of these can end
        origin, token = index // vocab, index % vocab
        texts = _pick(self.running, origin)
        texts[..., self.length] = token
        self.length += 1
        ended = (token == self.search.end) | (self.length == self.limit)
        self._finish(texts, score, ended)
        self.score, kept = (score + NEVER * ended).topk(count)
        self.running = _pick(texts, kept)
        worst = self.done_score.amin(1, keepdim=True).where(self.is_done, NEVER)
        self.active = self.active & (self.score[:, :1] / self.length > worst).any(1, keepdim=True)
        row = torch.arange(self.batch, device=token.device)[:, None]
        return (row * count + _pick(origin, kept)).flatten()

    def _finish(self, texts: Tensor, score: Tensor, ended: Tensor) -> None:
        count = self.search.beams
        ended = torch.cat([ended[:, :count], torch.zeros_like(ended[:, count:])], 1)
        mean = score / self.length + NEVER * ~ended + NEVER * ~self.active
        self.done_score, best = torch.cat([self.done_score, mean], 1).topk(count)
        self.done = _pick(torch.cat([self.done, texts], 1), best)
        self.is_done = _pick(torch.cat([self.is_done, ended], 1), best)


def _pick(values: Tensor, index: Tensor) -> Tensor:
    """Along dimension 1, by `index` [batch, n]."""
    return values[torch.arange(len(values), device=values.device)[:, None], index]


@lru_cache(maxsize=8)
def _ids(tokens: tuple[int, ...], device: torch.device) -> Tensor:
    """On the device once, not at every step."""
    return torch.tensor(tokens, dtype=torch.long, device=device)


def apply_rules(search: Search, scores: Tensor, generated: Tensor) -> Tensor:
    """`scores` [rows, vocab], logits or log-probabilities, with tokens that must not follow
    `generated` [rows, new so far] at minus infinity."""
    scores = scores.clone()
    if generated.shape[1] == 0:
        scores[:, _ids(search.suppress_first, scores.device)] = -math.inf
    scores[:, _ids(search.suppress, scores.device)] = -math.inf
    if search.first_timestamp is None:
        return scores
    return _apply_timestamp_rules(scores, generated, search.end, search.first_timestamp)


def _apply_timestamp_rules(scores: Tensor, generated: Tensor, end: int, first: int) -> Tensor:
    """Whisper's rules: a timestamp begins the text, then they come in pairs and never go back; and
    where all timestamps together are likelier than any text token, a timestamp must follow."""
    scores[:, first - 1] = -math.inf  # <|notimestamps|>
    token = torch.arange(scores.shape[1], device=scores.device)
    text, stamp = token < end, token >= first
    stamped = generated >= first
    if generated.shape[1] == 0:
        forbidden = ~stamp | (token > first + FIRST_SECOND)
    else:
        last = stamped[:, -1:]
        before = stamped[:, -2:-1] if generated.shape[1] > 1 else torch.ones_like(last)
        opened = last & ~before  # its pair, or the end, must follow
        latest = generated.where(stamped, first - 1).amax(1, keepdim=True)
        forbidden = (opened & text) | (last & before & stamp)
        forbidden = forbidden | (stamp & (token < latest + 1 - opened.long()))
    scores = scores.masked_fill(forbidden, -math.inf)
    likely = scores.log_softmax(1)
    favours_timestamp = likely[:, first:].logsumexp(1) > likely[:, :first].amax(1)
    return scores.masked_fill(favours_timestamp[:, None] & ~stamp, -math.inf)


def _uncompiled() -> AbstractContextManager[object]:
    """Sequence lengths change at every step: compiled layers would recompile."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes a second
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
