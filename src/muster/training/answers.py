"""What a language model says to questions of the scored data, or how it continues its texts: a few, in the
results.

The likeliest token each time, by the engine that trained: every rank computes the same, since a
forward pass may have collectives. There is no cache of keys and values, which not every layout has.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from muster.data.corpus import Split
from muster.data.loader import Inputs
from muster.data.mixture import MixedSource
from muster.data.text.chat import ChatSource, Question
from muster.observe.heartbeat import beat
from muster.tasks.causal_lm import CausalLM
from muster.tasks.chat import ChatLM
from muster.training.evaluate import choose_samples
from muster.training.job import Job
from muster.training.precision import autocast

log = logging.getLogger(__name__)

UNIT = 64  # lengths are multiples of it
PROMPT = 32  # tokens of a text that is continued, at most


@dataclass(frozen=True)
class Answer:
    row: str
    asked: str  # the conversation up to the reply
    expected: str
    answer: str


@dataclass(frozen=True)
class Continuation:
    step: int
    prompt: str
    expected: str
    text: str


def generates_answers(job: Job) -> bool:
    return isinstance(job.task, ChatLM) and job.recipe.evaluation.answers > 0


def answers(job: Job, split: Split) -> list[Answer]:
    """To the last questions of `evaluation.answers` rows of a split, spread evenly over it. All ranks call it."""
    task, wanted, layout = job.task, job.recipe.evaluation, job.mesh.layout
    if not isinstance(task, ChatLM) or not wanted.answers:
        return []
    if layout.pipeline > 1 or layout.context > 1:
        log.warning("no answers: a pipeline and context ranks generate none; see muster generate")
        return []
    source = task.source(split)
    if isinstance(source, MixedSource):
        source = source.sources[0]
    assert isinstance(source, ChatSource)
    questions = source.questions(wanted.answers, task.recipe.data.sequence_length - 1)
    if not questions:
        log.warning("no answers: no question of the %s data leaves room for one", split)
        return []
    given = _generate(job, task, questions, wanted.answer_tokens)
    decode = task.tokenizer.decode
    return [
        Answer(one.name, decode(one.asked), decode(one.expected), decode(ids))
        for one, ids in zip(questions, given, strict=True)
    ]


def continuations(job: Job, done: int, split: Split) -> list[Continuation]:
    """How a model of plain text continues the beginnings of `evaluation.answers` sequences of a split, spread
    evenly over it, by the weights that training ends with. All ranks call it."""
    task, wanted, layout = job.task, job.recipe.evaluation, job.mesh.layout
    if not isinstance(task, CausalLM) or isinstance(task, ChatLM) or not wanted.answers:
        return []
    source = task.source(split)
    if source is None or layout.pipeline > 1 or layout.context > 1:
        return []
    end, room = task.tokenizer.end, min(PROMPT, task.recipe.data.sequence_length // 2)
    texts = [source.load(int(i)).tokens for i in choose_samples(len(source), wanted.answers)]
    texts = [text[1:] if text[0] == end else text for text in texts if len(text) > room + 1]
    if not texts:
        return []
    questions = [  # begun by the end of another text, as `muster generate` begins
        Question(
            "", [end, *text[:room].tolist()], text[room : room + wanted.answer_tokens].tolist()
        )
        for text in texts[: wanted.answers]
    ]
    given = _generate(job, task, questions, wanted.answer_tokens)
    decode = task.tokenizer.decode
    return [
        Continuation(done, decode(one.asked[1:]), decode(one.expected), decode(ids))
        for one, ids in zip(questions, given, strict=True)
    ]


@torch.no_grad()
def _generate(
    job: Job, task: CausalLM, questions: list[Question], max_tokens: int
) -> list[list[int]]:
    """New tokens of each, without what ends them."""
    ends, size = task.ends, task.tokenizer.size
    length = task.recipe.data.sequence_length
    longest = max(len(question.asked) for question in questions)
    if not job.compiled:  # else every other length would be compiled anew
        length = min(length, -(-(longest + max_tokens) // UNIT) * UNIT)
    tokens = torch.full((len(questions), length), task.tokenizer.end)
    ids = [list(question.asked) for question in questions]
    done = [False] * len(ids)
    training = [part.training for part in job.engine.parts]
    for part in job.engine.parts:
        part.eval()
    for _ in range(max_tokens):
        beat("answers")
        if not job.mesh.any_rank(not all(done)):
            break
        for row, known in enumerate(ids):
            tokens[row, : len(known)] = torch.tensor(known)
        with autocast(job.precision, job.mesh.device):
            logits = job.engine.forward(Inputs((tokens.to(job.mesh.device),)))
        last = torch.tensor([len(known) - 1 for known in ids], device=logits.device)
        best = logits[torch.arange(len(ids), device=logits.device), last, :size].argmax(-1).tolist()
        for row, token in enumerate(best):
            if done[row]:
                continue
            if token not in ends:
                ids[row].append(token)
            done[row] = token in ends or len(ids[row]) == length
    for part, was in zip(job.engine.parts, training, strict=True):
        part.train(was)
    return [known[len(q.asked) :] for known, q in zip(ids, questions, strict=True)]
