"""JSON that others wrote: read within bounds, or refused in one sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostile import ANY_BYTES, FEW, TEXT, documents
from muster.errors import UnreadableError
from muster.reading.files import read_bytes
from muster.reading.json_file import DEEPEST, parse, parse_value, read

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT


def refusal(text: str | bytes, **options: str) -> str:
    with pytest.raises(UnreadableError) as caught:
        parse(text, "the/file.json", **options)
    words = str(caught.value)
    assert words.startswith("the/file.json")
    assert words.isprintable()
    return words


@FEW
@given(documents(LEAVES, TEXT))
def test_what_json_writes_is_read_back(value: object) -> None:
    assert parse_value(json.dumps(value), "x") == value
    assert parse_value(json.dumps(value, ensure_ascii=False).encode(), "x") == value


@FEW
@given(ANY_BYTES)
def test_any_bytes_are_read_or_refused_in_one_sentence(text: bytes) -> None:
    try:
        assert isinstance(parse(text, "x.json"), dict)
    except UnreadableError as error:
        words = str(error)
        assert words.startswith("x.json")
        assert words.isprintable()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "holds a list, expected an object"),
        ("null", "holds null, expected an object"),
        ("7", "holds a number, expected an object"),
        ('{"a": 1, "a": 2}', "has the key 'a' twice"),
        ('{"a": "\\ud800"}', "half of a character"),
        ('{"a": 1', "line 1: not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "thousands of digits"),
        (b'{"a": "\xff"}', "line 1: is not UTF-8"),
        ('{"a": ' * 100_000, f"more than {DEEPEST} deep"),
        ('{"a": ' + "[" * DEEPEST + "]" * DEEPEST + "}", f"more than {DEEPEST} deep"),
    ],
)
def test_a_refusal_says_what_is_wrong(text: str | bytes, words: str) -> None:
    assert words in refusal(text)


def test_as_deep_as_allowed_is_read() -> None:
    assert parse('{"a": ' + "[" * (DEEPEST - 1) + "]" * (DEEPEST - 1) + "}", "x")


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_taken_refused_or_null(number: str) -> None:
    text = f'{{"a": {number}, "b": 1.5}}'
    assert parse(text, "x")["b"] == 1.5
    assert parse(text, "x", numbers="null") == {"a": None, "b": 1.5}
    assert "expected finite numbers" in refusal(text, numbers="finite")


def test_a_file_that_is_too_large_or_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "large.json").write_bytes(b"x" * 2000)
    with pytest.raises(UnreadableError, match=r"large.json: is larger than 1 KiB"):
        read_bytes(tmp_path / "large.json", 1024)
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(UnreadableError, match="a pipe or a device"):
        read(tmp_path / "pipe.json")
    with pytest.raises(UnreadableError, match="a pipe or a device"):
        read(Path("/dev/zero"))
    with pytest.raises(IsADirectoryError):
        read(tmp_path)
