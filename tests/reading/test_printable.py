"""Foreign text never moves the cursor, turns its direction, or ends a line of its sentence."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostile import FEW, HOSTILE_TEXT
from muster.printable import LONG, in_one_line, printable

PARTS = st.sampled_from(
    ["\x1b[31m", "\x1b]0;title\x07", "\x9b2J", "\u202e", "\ud800", "[red]", "a", "\n"]
)


@FEW
@given(st.lists(HOSTILE_TEXT | PARTS).map("".join))
def test_no_control_character_is_left(text: str) -> None:
    shown = printable(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 for c in shown)
    shown.encode()
    assert not {"\u202e", "\u2066"} & set(shown)
    line = in_one_line(text)
    assert len(line) <= LONG
    assert line.splitlines() in ([], [line])


def test_plain_text_of_any_script_stays() -> None:
    for text in ("größer", "日本語 [red]", "a\tb\nc", "\u200fשלום"):
        assert printable(text) == text


@pytest.mark.parametrize("begin", ["\x9d", "\x1b]", "\x90", "\x9b", "\x1b[0", "\x1b "])
def test_sequences_that_never_end_are_looked_through_once(begin: str) -> None:
    start = time.process_time()
    printable(begin * 20_000)
    assert time.process_time() - start < 0.5


def test_titles_and_links_are_taken_out_whole() -> None:
    assert printable("a\x1b]0;title\x07b\x9dlink\x9cc\x90x\x1b\\d") == "abcd"
