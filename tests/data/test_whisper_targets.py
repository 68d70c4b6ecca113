"""What the decoder reads and learns."""

from __future__ import annotations

from muster.data.loader import IGNORE
from muster.data.speech.whisper_targets import pair

PROMPT, END = [90, 91], 99


def test_the_text_and_its_end_are_learnt_after_the_prompt():
    tokens, targets = pair(PROMPT, [[1, 2, 3], [4]], END)
    assert tokens.tolist() == [[90, 91, 1, 2, 3], [90, 91, 4, END, END]]
    assert targets.tolist() == [[IGNORE, 1, 2, 3, END], [IGNORE, 4, END, IGNORE, IGNORE]]


def test_a_text_that_is_cut_is_not_taught_to_end_there():
    tokens, targets = pair(PROMPT, [[1, 2, 3], [4, 5]], END, max_tokens=2)
    assert tokens.tolist() == [[90, 91, 1, 2], [90, 91, 4, 5]]
    assert targets.tolist() == [[IGNORE, 1, 2, IGNORE], [IGNORE, 4, 5, END]]


def test_a_broken_clip_teaches_nothing():
    _, targets = pair(PROMPT, [[1, 2], [4, 5]], END, broken=[True, False])
    assert targets.tolist() == [[IGNORE] * 4, [IGNORE, 4, 5, END]]
