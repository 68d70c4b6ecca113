"""Whisper's normalisers, through transformers."""

import json
import sys

import pytest
from transformers import WhisperTokenizer

from muster.errors import RecipeError
from muster.evaluate.error_rates import count
from muster.evaluate.normalise import make_normaliser, read_spelling
from real import WHISPER, needs_whisper

TEXTS = [
    "Mr. Park said: it's twenty-one dollars!",
    "He won't [laughs] go, (um) Dr. Smith.",
    "The colour of 1,000 grey Cars…",
    " ÄRGER: naïve  café ",
    "",
    "½ 1/0 $. 3rd £5.20 50%",
]


@needs_whisper
def test_english_and_basic_rules_are_those_of_transformers_tokenizer():
    theirs = WhisperTokenizer.from_pretrained(WHISPER)
    theirs.english_spelling_normalizer = spelling = {"colour": "color"}
    english, basic = make_normaliser("whisper", spelling), make_normaliser("basic")
    for text in TEXTS:
        assert english(text) == theirs.normalize(text).strip()
        assert basic(text) == theirs.basic_normalize(text).strip()
        assert make_normaliser("none")(text) == text


def test_what_sounds_the_same_counts_as_the_same():
    english = make_normaliser("whisper", {"colour": "color"})
    assert english("Mr. Lee, it's the COLOUR twenty-one!") == "mister lee it is the color 21"
    assert make_normaliser("whisper", None)("colour") == "colour"
    assert make_normaliser("basic")("It's Grün!") == "it s grün"
    pair = english("The colour, of it."), english("the color of it")
    assert count(*pair).word_edits == 0


def test_spellings_are_read_where_a_folder_has_them(tmp_path):
    assert read_spelling(tmp_path) is None
    (tmp_path / "normalizer.json").write_text(json.dumps({"grey": "gray"}))
    assert read_spelling(tmp_path) == {"grey": "gray"}
    assert make_normaliser("whisper", read_spelling(tmp_path))("Grey!") == "gray"


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_damaged_spellings_are_named(tmp_path, text):
    (tmp_path / "normalizer.json").write_text(text)
    with pytest.raises(RecipeError, match=r"normalizer\.json is damaged"):
        read_spelling(tmp_path)


def test_without_transformers_the_cure_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.models.whisper", None)
    with pytest.raises(RecipeError, match=r"evaluation\.normalizer.*pip install transformers"):
        make_normaliser("whisper")
    assert make_normaliser("none")("As Is") == "As Is"
