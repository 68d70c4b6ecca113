"""Strategies for property-based tests. The characters are given, not drawn from all of Unicode: the tables
of which would be built at each start, or kept in the tree."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

set_hypothesis_home_dir(Path(tempfile.gettempdir()) / f"hypothesis-{os.getuid()}")  # not the tree

FEW = settings(max_examples=50, derandomize=True, database=None, deadline=None)
WHOLE = "abzAZ019 .,:;-_+/\\~'\"`()[]{}<>#!?&*%@$|=^\t\n\r\x01\x1b\x7f\x85\x9b\xa0ßé中\u200f\u202e\u2028\ufeff\uffff😀"
CHARACTERS = WHOLE + "\0\ud800\udfff"
TEXT = st.text(WHOLE, max_size=20)
HOSTILE_TEXT = st.text(CHARACTERS, max_size=20)
ANY_BYTES = st.binary(max_size=40) | HOSTILE_TEXT.map(
    lambda text: text.encode("utf-8", "surrogatepass")
)


def documents(leaves: st.SearchStrategy[object], keys: st.SearchStrategy[str]) -> st.SearchStrategy:
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
        max_leaves=8,
    )
