"""Transcripts become ids and come back, and what cannot be written is refused by name."""

import json
import subprocess
import sys

import pytest

from muster.data.speech.vocabulary import (
    DEFAULT_CHARACTERS,
    Characters,
    Subwords,
    Vocabulary,
    build_vocabulary,
    normalise,
)
from muster.errors import DataError

NUMBERS = ["one two three", "twenty three", "thirty one", "two hundred and thirty two"] * 3


def test_the_default_alphabet_has_29_symbols_with_the_blank_first():
    vocabulary = Characters()
    assert vocabulary.size == 29
    assert vocabulary.pieces[0] == ""
    assert vocabulary.encode("az' ") == [1, 26, 27, 28]


def test_characters_come_back_as_they_went_in():
    vocabulary = Characters()
    text = "it's half past nine"
    assert vocabulary.decode(vocabulary.encode(text)) == text
    assert vocabulary.decode([]) == ""
    assert vocabulary.encode("") == []


@pytest.mark.parametrize("blank_or_beyond", [0, -1, 29])
def test_decoding_refuses_ids_that_are_no_symbols(blank_or_beyond):
    with pytest.raises(ValueError, match=str(blank_or_beyond)):
        Characters().decode([1, blank_or_beyond])


@pytest.mark.parametrize("characters", ["", "abca"])
def test_an_alphabet_must_name_each_character_once(characters):
    with pytest.raises(DataError, match=r"data\.tokenizer\.characters"):
        Characters(characters)


def test_normalising_makes_one_spelling_of_many():
    assert normalise("  It’s\u00a0nine\t\no´clock ", lowercase=True) == "it's nine o'clock"
    assert normalise("ﬁve caf\u0065\u0301", lowercase=False) == "five caf\u00e9"
    assert normalise("Keep Case", lowercase=False) == "Keep Case"


def test_normalising_twice_changes_nothing_more():
    for text in ["J\u030cemal", "İstanbul", "ＦＵＬＬ　width", "ẞ ǅ ½ …", "‘tis `so`"]:
        once = normalise(text, lowercase=True)
        assert normalise(once, lowercase=True) == once


def test_an_unknown_character_is_named_with_its_cures():
    with pytest.raises(DataError) as refused:
        Characters().encode("café")
    message = str(refused.value)
    assert "'é'" in message
    assert "U+00E9" in message
    assert "data.tokenizer.characters" in message
    assert "data.unknown_characters=drop" in message
    assert "data.lowercase=true" not in message  # it would not help


def test_a_capital_is_cured_by_lowercase():
    with pytest.raises(DataError, match=r"'N'.*data\.lowercase=true"):
        Characters().encode("Nine")


def test_dropping_unknown_characters_leaves_no_gap_behind():
    vocabulary = Characters()
    assert vocabulary.decode(vocabulary.encode("nine – ten!", drop=True)) == "nine ten"


def test_unknown_characters_are_counted_and_traced_to_their_first_row():
    found = Characters().find_unknown(["one", "caf\u00e9 \u00e9t\u00e9", "7 caf\u00e9"])
    assert found == {"\u00e9": (4, 1), "7": (1, 2)}


def test_subwords_come_back_as_they_went_in():
    vocabulary = Subwords.learn(NUMBERS, vocabulary_size=40)
    for text in [*NUMBERS, "two", "", "dont wear it out"]:
        ids = vocabulary.encode(text)
        assert 0 not in ids
        assert all(0 < i < vocabulary.size for i in ids)
        assert vocabulary.decode(ids) == text


def test_subwords_are_fewer_than_characters_and_never_cross_a_space():
    vocabulary = Subwords.learn(NUMBERS, vocabulary_size=40)
    assert len(vocabulary.encode("thirty two")) < len("thirty two") / 2
    assert all(" " not in piece[1:] for piece in vocabulary.pieces)


def test_subwords_of_the_size_asked_for_count_the_blank():
    assert Subwords.learn(NUMBERS, vocabulary_size=30).size == 30


def test_subwords_make_do_with_what_the_text_holds():
    vocabulary = Subwords.learn(["go go"], vocabulary_size=1000)
    assert vocabulary.size == 6  # blank, g, o, the word mark and two merges
    assert vocabulary.encode("go go") == [vocabulary.pieces.index(" go")] * 2


def test_too_few_subwords_for_the_alphabet_is_an_error_that_names_the_key():
    alphabet = len(set("".join(NUMBERS)) - {" "}) + 1  # and the word mark
    with pytest.raises(
        DataError, match=rf"data\.tokenizer\.vocabulary_size={alphabet} .* {alphabet + 1}\."
    ):
        Subwords.learn(NUMBERS, vocabulary_size=alphabet)
    assert Subwords.learn(NUMBERS, vocabulary_size=alphabet + 1).size == alphabet + 1


def test_learning_subwords_from_nothing_is_an_error():
    with pytest.raises(DataError, match=r"no text.*data\.text_column"):
        Subwords.learn(["", "  "], vocabulary_size=30)


def test_the_same_text_gives_the_same_subwords_in_another_process():
    program = (
        "import json; from muster.data.speech.vocabulary import Subwords; "
        f"print(json.dumps(Subwords.learn({NUMBERS!r}, 40).to_json()))"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert json.loads(there.stdout) == Subwords.learn(NUMBERS, 40).to_json()


def test_subwords_refuse_or_drop_what_the_training_text_did_not_have():
    vocabulary = Subwords.learn(NUMBERS, vocabulary_size=40)
    with pytest.raises(DataError, match=r"'z'.*data\.tokenizer\.kind=characters"):
        vocabulary.encode("zero")
    assert vocabulary.decode(vocabulary.encode("two z three", drop=True)) == "two three"


def test_the_word_mark_in_a_transcript_is_no_word_break():
    vocabulary = Subwords.learn([*NUMBERS, "one▁two"], vocabulary_size=40)
    assert vocabulary.find_unknown(["one▁two"]) == {"▁": (1, 0)}


@pytest.mark.parametrize("vocabulary", [Characters("ab c"), Subwords.learn(NUMBERS, 40)])
def test_a_vocabulary_survives_json(vocabulary):
    again = Vocabulary.from_json(json.loads(json.dumps(vocabulary.to_json())))
    assert type(again) is type(vocabulary)
    assert again.pieces == vocabulary.pieces
    text = "two hundred" if isinstance(vocabulary, Subwords) else "a cab"
    assert again.encode(text) == vocabulary.encode(text)


@pytest.mark.parametrize("saved", [{}, {"kind": "bytes"}, {"kind": "subwords", "units": ["a"]}])
def test_a_damaged_vocabulary_is_refused(saved):
    with pytest.raises(DataError, match="saved vocabulary"):
        Vocabulary.from_json(saved)


def test_the_recipe_chooses_the_kind():
    assert isinstance(build_vocabulary("characters", DEFAULT_CHARACTERS, 256, []), Characters)
    assert isinstance(build_vocabulary("subwords", "", 40, NUMBERS), Subwords)
