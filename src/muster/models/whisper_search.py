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
NEVER = -1e9  # a score that loses to all real ones, yet can be added to


@dataclass(frozen=True)
class Search:
    """How to look for what follows a prompt.

    `anyone` is asked once per step, with whether this process has unfinished rows, and says
    whether to go on: where a forward pass takes all ranks, they must take equally many.
    """

    end: int  # the token that ends a text; those below it are text
    limit: int  # the most new tokens
    beams: int = 1
    suppress: tuple[int, ...] = ()
    suppress_first: tuple[int, ...] = ()  # not as the first new token
    first_timestamp: int | None = None  # the token <|0.00|>; Whisper's rules for timestamps hold
    anyone: Callable[[bool], bool] = bool


class Speaker(Protocol):
    """A decoder that remembers what it was given."""

    def next(self, tokens: Tensor) -> Tensor:
        """Logits [rows, vocab], float32, of what follows `tokens` [rows, time] and all before."""
        ...

    def select(self, rows: Tensor) -> None:
        """Go on with the memory of `rows`, in that order."""
        ...


@torch.no_grad()
def find(search: Search, prompt: Tensor, speaker: Speaker, positions: int) -> Tensor:
    """New tokens [batch, new], at most as many as fit into `positions` after the prompt."""
    limit = min(search.limit, positions - prompt.shape[1])
    if limit < 1:
        raise ValueError(f"no room for a new token: limit {search.limit}, {positions} positions")
    seek = _beam if search.beams > 1 else _greedy
    with _uncompiled():
        return seek(search, prompt, speaker, limit)


def _greedy(search: Search, tokens: Tensor, speaker: Speaker, limit: int) -> Tensor:
    said = tokens[:, :0]
    ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    for step in range(limit):
        choice = ruled(search, speaker.next(tokens), said).argmax(1)
        tokens = choice.masked_fill(ended, search.end)[:, None]
        said = torch.cat([said, tokens], 1)
        ended = ended | (tokens[:, 0] == search.end)
        if step + 1 < limit and not search.anyone(not bool(ended.all())):
            break
    return said


def _beam(search: Search, tokens: Tensor, speaker: Speaker, limit: int) -> Tensor:
    beams = _Beams(search, len(tokens), limit, tokens.device)
    logits = speaker.next(tokens).repeat_interleave(search.beams, 0)
    speaker.select(torch.arange(len(tokens), device=tokens.device).repeat_interleave(search.beams))
    while True:
        speaker.select(beams.grow(logits.log_softmax(1)))
        if beams.length == limit or not search.anyone(bool(beams.hopeful.any())):
            return beams.done[:, 0, : beams.length]
        logits = speaker.next(beams.running[..., beams.length - 1].reshape(-1, 1))


class _Beams:
    """The hypotheses of every row: `beams` that grow and the `beams` best that have ended.

    A score is the sum of log-probabilities; of what has ended, their mean. A row ends when its best
    growing beam, at its present mean, would not displace the worst of as many ended ones.
    """

    def __init__(self, search: Search, batch: int, limit: int, device: torch.device) -> None:
        self.search, self.batch, self.limit, self.length = search, batch, limit, 0
        shape = (batch, search.beams)
        self.running = torch.full((*shape, limit), search.end, device=device)
        self.score = torch.zeros(shape, device=device)
        self.score[:, 1:] = NEVER  # all begin alike: only one of them counts
        self.done, self.done_score = self.running, torch.full(shape, NEVER, device=device)
        self.is_done = torch.zeros(shape, dtype=torch.bool, device=device)
        self.hopeful = torch.ones((batch, 1), dtype=torch.bool, device=device)

    def grow(self, log_probs: Tensor) -> Tensor:
        """One token more, given [batch · beams, vocab]; the rows to remember, [batch · beams]."""
        count, vocab = self.search.beams, log_probs.shape[1]
        said = self.running[..., : self.length].flatten(0, 1)
        total = (
            ruled(self.search, log_probs, said).unflatten(0, (-1, count)) + self.score[..., None]
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
        self.hopeful = self.hopeful & (self.score[:, :1] / self.length > worst).any(1, keepdim=True)
        row = torch.arange(self.batch, device=token.device)[:, None]
        return (row * count + _pick(origin, kept)).flatten()

    def _finish(self, texts: Tensor, score: Tensor, ended: Tensor) -> None:
        count = self.search.beams
        ended = torch.cat([ended[:, :count], torch.zeros_like(ended[:, count:])], 1)
        mean = score / self.length + NEVER * ~ended + NEVER * ~self.hopeful
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


def ruled(search: Search, scores: Tensor, said: Tensor) -> Tensor:
    """`scores` [rows, vocab], logits or log-probabilities, with what must not follow `said`
    [rows, new so far] at minus infinity."""
    scores = scores.clone()
    if said.shape[1] == 0:
        scores[:, _ids(search.suppress_first, scores.device)] = -math.inf
    scores[:, _ids(search.suppress, scores.device)] = -math.inf
    if search.first_timestamp is None:
        return scores
    return _timed(scores, said, search.end, search.first_timestamp)


def _timed(scores: Tensor, said: Tensor, end: int, first: int) -> Tensor:
    """Whisper's rules: a timestamp begins the text, then they come in pairs and never go back; and
    where all timestamps together are likelier than any text, one of them it is."""
    scores[:, first - 1] = -math.inf  # <|notimestamps|>
    token = torch.arange(scores.shape[1], device=scores.device)
    text, stamp = token < end, token >= first
    stamped = said >= first
    if said.shape[1] == 0:
        barred = ~stamp | (token > first + FIRST_SECOND)
    else:
        last = stamped[:, -1:]
        before = stamped[:, -2:-1] if said.shape[1] > 1 else torch.ones_like(last)
        opened = last & ~before  # its pair, or the end, must follow
        latest = said.where(stamped, first - 1).amax(1, keepdim=True)
        barred = (opened & text) | (last & before & stamp)
        barred = barred | (stamp & (token < latest + 1 - opened.long()))
    scores = scores.masked_fill(barred, -math.inf)
    likely = scores.log_softmax(1)
    timely = likely[:, first:].logsumexp(1) > likely[:, :first].amax(1)
    return scores.masked_fill(timely[:, None] & ~stamp, -math.inf)


def _uncompiled() -> AbstractContextManager[object]:
    """Sequences grow at every step: a compiled layer would be compiled again and again."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes a second
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
