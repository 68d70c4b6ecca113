"""Text from a trained language model, one token at a time."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from muster.data.batches import keyed_generator
from muster.data.text.chat import reply_ends
from muster.data.text.chat_template import ChatTemplate, find_template
from muster.data.text.conversations import Message
from muster.data.text.tokenizers import pieces
from muster.errors import MusterError, RecipeError
from muster.inference.load import Trained
from muster.models.decoder import Cache
from muster.models.huggingface.locate import locate
from muster.tasks.causal_lm import CausalLM
from muster.tasks.chat import ChatLM

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Temperature 0 takes the likeliest."""

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        _require("--temperature", self.temperature, 0 <= self.temperature < np.inf, "0 or more")
        _require("--top-k", self.top_k, self.top_k is None or self.top_k > 0, "1 or more")
        _require("--top-p", self.top_p, 0 < self.top_p <= 1, "above 0, and 1 at most")

    def distribution(self, logits: Tensor) -> NDArray[np.float64]:
        """Probabilities from logits `[vocab]`: temperature first, then the `top_k` likeliest, then
        the fewest likeliest that together hold at least `top_p` of what is left."""
        logits = logits.double().cpu()
        if self.temperature == 0:
            chances = torch.zeros_like(logits)
            chances[logits.argmax()] = 1.0
            return chances.numpy()
        chances, order = (logits / self.temperature).softmax(-1).sort(descending=True, stable=True)
        chances[self.top_k or len(chances) :] = 0.0
        chances /= chances.sum()
        chances[chances.cumsum(-1) - chances >= self.top_p] = 0.0
        return torch.zeros_like(chances).scatter(0, order, chances / chances.sum()).numpy()

    def draw(self, logits: Tensor, random: np.random.Generator) -> int:
        edges = self.distribution(logits).cumsum()
        return int(np.searchsorted(edges, random.random() * edges[-1], side="right"))


def generate(
    trained: Trained,
    prompt: str,
    *,
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    samples: int = 1,
) -> Iterator[Iterator[str]]:
    """Continuations of `prompt`: one stream of pieces of text per sample, to be read in turn.

    Each ends with the document, after `max_tokens`, or where the model's positions end. Random
    numbers follow (seed, sample), so a stream is the same however many are asked for.
    """
    _require("--samples", samples, samples > 0, "1 or more")
    task = language_model(trained)
    before = [task.tokenizer.end, *task.tokenizer.encode(prompt)]
    if len(before) > task.config.positions:
        raise MusterError(
            f"the prompt has {len(before) - 1} tokens, and the model's {task.config.positions} "
            f"positions take {task.config.positions - 1} at most; shorten it"
        )
    sampling = Sampling(temperature, top_k, top_p)
    return _streams(trained, task, before, 1, task.ends, sampling, max_tokens, seed, range(samples))


def answer(
    trained: Trained,
    messages: Sequence[Message],
    *,
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    sample: int = 0,
) -> Iterator[str]:
    """The assistant's reply to a conversation, in pieces, by the chat template that the model has.

    It ends with the end of a turn or of text, after `max_tokens`, or where the model's positions end.
    """
    task, now = language_model(trained), datetime.datetime.now()
    template = template_of(trained)
    try:
        text = template.render(messages, prompt=True, now=now)
    except ValueError as error:
        raise MusterError(f"the conversation cannot be asked: {error}") from None
    before: list[int] = task.tokenizer.encode_marked(text)[0].tolist()
    if len(before) > task.config.positions:
        raise MusterError(
            f"the conversation has {len(before)} tokens, more than the model's {task.config.positions} "
            "positions; start a new one"
        )
    ends = task.ends | reply_ends(task.tokenizer, template)
    sampling = Sampling(temperature, top_k, top_p)
    streams = _streams(trained, task, before, 0, ends, sampling, max_tokens, seed, [sample])
    return next(streams)


def language_model(trained: Trained) -> CausalLM:
    task = trained.task
    if not isinstance(task, CausalLM):
        raise MusterError(
            f"{trained.saved.path} is of task {trained.task.recipe.task}; generating needs causal-lm"
        )
    return task


def template_of(trained: Trained) -> ChatTemplate:
    """The one that the model was trained with; of a model trained on text, that of its tokenizer."""
    task, data = language_model(trained), trained.task.recipe.data
    if isinstance(task, ChatLM):
        return task.template
    try:
        pretrained = task.recipe.model.pretrained
        folder = locate(pretrained, fetch=False) if pretrained else None
        found = task.tokenizer.folder(data.tokenizer.path, folder)
        return find_template(data.chat_template, found, task.tokenizer.end_text)
    except RecipeError as error:
        raise MusterError(
            f"{trained.saved.path} was trained on text, not on chat rows, and {error}"
        ) from None


def _streams(
    trained: Trained,
    task: CausalLM,
    before: list[int],
    unseen: int,
    ends: frozenset[int],
    sampling: Sampling,
    max_tokens: int,
    seed: int,
    samples: Sequence[int],
) -> Iterator[Iterator[str]]:
    """Text after the tokens `before`, of which the first `unseen` are no text, until one of `ends`."""
    _require("--max-tokens", max_tokens, max_tokens > 0, "1 or more")
    _require("--seed", seed, seed >= 0, "0 or more")
    cache = Cache()
    logits = _next_logits(trained, before, cache)
    return (
        pieces(
            task.tokenizer,
            before[unseen:],
            _tokens(
                trained, task, cache, logits, ends, sampling, keyed_generator(seed, i), max_tokens
            ),
        )
        for i in samples
    )


def _tokens(
    trained: Trained,
    task: CausalLM,
    prompt: Cache,
    logits: Tensor,
    ends: frozenset[int],
    sampling: Sampling,
    random: np.random.Generator,
    max_tokens: int,
) -> Iterator[int]:
    """New tokens after a prompt whose keys and values, and last `logits`, all samples share."""
    cache = Cache()
    cache.layers = dict(prompt.layers)  # appending makes new tensors: the prompt's stay as they are
    for _ in range(max_tokens):
        token = sampling.draw(logits[: task.tokenizer.size], random)
        if token in ends:
            return
        yield token
        if cache.length == task.config.positions:
            log.warning("stopped: the model has no position after its %d tokens", cache.length)
            return
        logits = _next_logits(trained, [token], cache)


@torch.no_grad()
def _next_logits(trained: Trained, tokens: list[int], cache: Cache) -> Tensor:
    """Logits `[vocab]` of the token after `tokens`, which join the cache."""
    output: Tensor = trained.model(torch.tensor([tokens], device=trained.device), cache=cache)
    return output[0, -1]


def _require(option: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise MusterError(f"{option}: got {value}, expected {expected}")
