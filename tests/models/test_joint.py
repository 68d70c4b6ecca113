"""Joint CTC/attention decoding against the sum over all alignments, written out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from muster.models.whisper.joint import CTCPrefixes, JointDecoder
from muster.models.whisper.search import NEVER, Search, generate

FRAMES, TOKENS = 5, 3
END = BLANK = TOKENS  # as numbers; one is a token, the other a symbol of the head


def collapsed(alignment: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(symbol for symbol, _ in itertools.groupby(alignment) if symbol != BLANK)


class Reference:
    """p of every text, and of all texts with a beginning."""

    def __init__(self, logits: Tensor) -> None:
        frames = logits.double().softmax(1)
        self.whole: dict[tuple[int, ...], float] = {}
        for alignment in itertools.product(range(len(frames[0])), repeat=len(frames)):
            p = math.prod(float(frames[t, s]) for t, s in enumerate(alignment))
            text = collapsed(alignment)
            self.whole[text] = self.whole.get(text, 0.0) + p

    def beginning(self, text: tuple[int, ...]) -> float:
        return sum(p for whole, p in self.whole.items() if whole[: len(text)] == text)

    def next(self, text: tuple[int, ...]) -> list[float]:
        """As the head is asked: ln p of each token, then of the end."""
        share = [self.beginning((*text, token)) for token in range(TOKENS)]
        share.append(self.whole.get(text, 0.0))
        total = self.beginning(text)
        return [math.log(p / total) if p else -math.inf for p in share]


@pytest.fixture(scope="module")
def logits() -> Tensor:
    return 2 * torch.randn(2, FRAMES, BLANK + 1, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def references(logits: Tensor) -> list[Reference]:
    return [Reference(clip) for clip in logits]


@pytest.mark.parametrize("text", [(), (1,), (1, 1), (1, 0, 0), (2, 1, 2, 0), (0, 0, 0)])
def test_a_token_has_the_probability_of_all_alignments_that_go_on_with_it(logits, references, text):
    prefixes = CTCPrefixes(logits)
    for token in text:
        prefixes.append(torch.tensor([token, token]))
    for row, reference in zip(prefixes.next().tolist(), references, strict=True):
        expected = [max(NEVER, p) for p in reference.next(text)]
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_texts_of_a_beam_follow_their_own_clip(logits, references):
    prefixes = CTCPrefixes(logits)
    prefixes.select(torch.tensor([0, 0, 1, 1]))
    prefixes.append(torch.tensor([0, 1, 2, 0]))
    prefixes.select(torch.tensor([1, 1, 3, 2]))
    prefixes.append(torch.tensor([1, 2, 0, 2]))
    texts = [(0, (1, 1)), (0, (1, 2)), (1, (0, 0)), (1, (2, 2))]
    for row, (clip, text) in zip(prefixes.next().tolist(), texts, strict=True):
        assert row == pytest.approx(references[clip].next(text), rel=1e-4, abs=1e-6)


def test_a_text_that_no_alignment_has_leaves_the_choice_to_the_decoder(logits):
    prefixes = CTCPrefixes(logits)
    for _ in range(FRAMES):
        prefixes.append(torch.tensor([0, 0]))
    assert prefixes.next().tolist() == [[0.0] * (TOKENS + 1)] * 2


class Fixed:
    """A decoder whose next token depends on the number of tokens before it."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.step = rows, 0

    def next(self, tokens: Tensor) -> Tensor:
        self.step += 1
        return self.rows[self.step - 1].expand(len(tokens), -1)

    def select(self, rows: Tensor) -> None:
        pass


def joint_score(reference: Reference, rows: Tensor, weight: float, text: list[int]) -> float:
    total = 0.0
    for step, token in enumerate(text):
        ctc = reference.next(tuple(text[:step]))[token]
        total += (1 - weight) * float(rows[step].log_softmax(0)[token]) + weight * ctc
    return total


@pytest.mark.parametrize("beams", [1, 2 * (TOKENS + 1) ** 2])
@pytest.mark.parametrize("weight", [0.3, 0.9])
def test_the_search_follows_the_weighted_sum(logits, references, beams, weight):
    """Greedy takes the best token at each step; a beam that keeps everything, the best text by the mean."""
    rows = 2 * torch.randn(3, END + 2, generator=torch.Generator().manual_seed(4))
    search = Search(end=END, limit=3, beams=beams, ctc_weight=weight)
    decoder = JointDecoder(Fixed(rows), CTCPrefixes(logits), weight)
    found = generate(search, torch.tensor([[END]] * 2), decoder, positions=9).tolist()
    for said, reference in zip(found, references, strict=True):
        said = said[: said.index(END) + 1] if END in said else said
        if beams == 1:
            expected: list[int] = []
            while len(expected) < 3 and expected[-1:] != [END]:
                scores = [
                    joint_score(reference, rows, weight, [*expected, t]) for t in range(TOKENS + 1)
                ]
                expected.append(max(range(TOKENS + 1), key=scores.__getitem__))
        else:
            texts = [
                [*text, END][:3]
                for size in range(4)
                for text in itertools.product(range(TOKENS), repeat=size)
            ]
            expected = max(texts, key=lambda t: joint_score(reference, rows, weight, t) / len(t))
        assert said == expected
