"""YAML that others wrote: read within bounds, or refused in one sentence."""

from __future__ import annotations

import time

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from hostile import ANY_BYTES, FEW, TEXT, documents
from muster.errors import UnreadableError
from muster.reading.values import DEEPEST, LARGEST, MOST
from muster.reading.yaml_file import parse

LEAVES = st.none() | st.booleans() | st.integers(-LARGEST, LARGEST) | TEXT
YAML_TEXT = st.text("ab:-? []{}&*!|>'\"\\%@`#,\n\t1.e<~", max_size=40).map(str.encode)
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)


def refusal(text: str | bytes) -> str:
    with pytest.raises(UnreadableError) as caught:
        parse(text, "the/file.yaml")
    words = str(caught.value)
    assert words.startswith("the/file.yaml")
    assert words.isprintable()
    return words


@FEW
@given(documents(LEAVES, TEXT))
def test_what_yaml_writes_is_read_back(value: object) -> None:
    assert parse(yaml.safe_dump(value, allow_unicode=True), "x") == value


@FEW
@given(ANY_BYTES | YAML_TEXT)
def test_any_bytes_are_read_or_refused_in_one_sentence(text: bytes) -> None:
    try:
        parse(text, "x.yaml")
    except UnreadableError as error:
        words = str(error)
        assert words.startswith("x.yaml")
        assert words.isprintable()


@pytest.mark.parametrize(
    "text",
    [
        "1e-4",
        "1e5",
        "1_000",
        "0x10",
        "2024-01-01",
        ".inf",
        "-.INF",
        "010",
        "1.5e+3",
        ".5",
        "yes",
        "~",
    ],
)
def test_a_value_means_what_it_does_to_omegaconf(text: str) -> None:
    assert parse(f"a: {text}", "x") == OmegaConf.to_container(OmegaConf.create(f"a: {text}"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, f"line 5: holds more than {MOST:,} values"),
        ("a: [" + "1," * 50_000 + "]", f"line 1: holds more than {MOST:,} values"),
        ("a: " + "x" * 100_000, "a: is a text of 100,000 characters"),
        ("[" * 1_000_000, f"line 1: lists and sections lie more than {DEEPEST} deep"),
        ("- " * 1_000_000, f"line 1: lists and sections lie more than {DEEPEST} deep"),
        ("a: &a [*a]", "line 1: *a refers to itself"),
        ("a: !!python/object/apply:os.system [true]", "python/object/apply:os.system is not read"),
        ("a: !!binary aGk=", "the tag tag:yaml.org,2002:binary is not read here"),
        ("a: !!int x", "not valid YAML"),
        ("b: 1\na: 1\na: 2", "line 3: not valid YAML: found duplicate key a"),
        ("a: 1\n---\nb: 2", "line 2: holds a second document"),
        (f"a: {{b: {LARGEST + 1}}}", "a.b: is a whole number beyond 2^53"),
        ('a: [1, "\\0"]', "a[1]: holds a NUL character"),
        (b"a: 1\nb: \xff", "line 2: is not UTF-8"),
        ("a: \x00", "not valid YAML"),
        ("~: 1", "has a key that is no text"),
    ],
)
def test_a_refusal_says_what_is_wrong_and_where(text: str | bytes, words: str) -> None:
    assert words in refusal(text)


def test_an_anchor_may_be_used_again() -> None:
    text = "base: &base {lr: 1e-3, steps: 5}\nown: {<<: *base, steps: 6}\n"
    assert parse(text, "x")["own"] == {"lr": 1e-3, "steps": 6}


def test_a_number_of_many_parts_is_refused_before_it_is_multiplied() -> None:
    begin = time.process_time()
    for text in ("a: " + "1:" * 40_000 + "1", "1:" * 400 + "1: a", "- [" + "1:" * 40_000 + "1]"):
        assert "found a number of more than 400 characters" in refusal(text)
    assert time.process_time() - begin < 1.0
    assert parse("a: 1:30:00", "x") == {"a": 5400}
