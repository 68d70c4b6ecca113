"""Error rates are counts that add, whoever counted."""

import random

import pytest

from muster.evaluate.error_rates import EditCounts, count

PAIRS = [
    ("one two three", "one too three"),
    ("four", "four"),
    ("five six", "five"),
    ("seven", "seven eight nine"),
    ("", "ten"),
]


def total(pairs):
    return sum((count(*pair) for pair in pairs), EditCounts())


def test_each_kind_of_edit_is_counted_as_itself():
    counts = count("a b c d", "a x c d e")
    assert (counts.words, counts.word_substitutions, counts.word_insertions) == (4, 1, 1)
    assert count("a b c", "a c").word_deletions == 1
    assert counts.wer == 0.5


def test_characters_are_counted_with_the_spaces_between_words():
    counts = count("ab cd", "abcd")
    assert (counts.chars, counts.char_edits) == (5, 1)
    assert counts.cer == pytest.approx(0.2)


def test_every_kind_of_character_edit_counts():
    assert count("abcd", "abxcd").char_edits == 1
    assert count("abcd", "abd").char_edits == 1
    assert count("abcd", "abxd").char_edits == 1


def test_a_clip_without_errors_is_exact_whatever_the_white_space():
    counts = count(" one  two ", "one two")
    assert counts == EditCounts(words=2, chars=7, clips=1, exact_clips=1)


def test_an_empty_reference_makes_every_word_an_insertion():
    counts = count("", "two words")
    assert counts == EditCounts(word_insertions=2, char_edits=9, clips=1)
    assert counts.wer == 2.0
    assert count("", " ").exact_clips == 1
    assert count("", "").wer == 0.0


def test_an_empty_hypothesis_makes_every_word_a_deletion():
    counts = count("two words", "")
    assert (counts.word_deletions, counts.char_edits, counts.wer, counts.cer) == (2, 9, 1.0, 1.0)


def test_counts_of_two_ranks_add_to_the_counts_of_one():
    whole = total(PAIRS)
    assert total(PAIRS[:2]) + total(PAIRS[2:]) == whole
    assert whole.wer == 5 / 7
    assert (whole.exact_clips, whole.clips) == (1, 5)
    mean_of_rates = (total(PAIRS[:2]).wer + total(PAIRS[2:]).wer) / 2
    assert mean_of_rates != pytest.approx(whole.wer)


def distance(reference, hypothesis) -> int:
    """Levenshtein's, row by row."""
    row = list(range(len(hypothesis) + 1))
    for i, a in enumerate(reference, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(hypothesis, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


@pytest.mark.parametrize("seed", range(5))
def test_substitutions_deletions_and_insertions_add_to_the_least_number_of_edits(seed):
    rng = random.Random(seed)
    for _ in range(40):
        reference, hypothesis = (
            rng.choices(["a", "bb", "ccc", "née", "d."], k=rng.randint(0, 9)) for _ in range(2)
        )
        counts = count(" ".join(reference), " ".join(hypothesis))
        assert counts.word_edits == distance(reference, hypothesis)
        assert counts.char_edits == distance(" ".join(reference), " ".join(hypothesis))
        added = counts.word_insertions - counts.word_deletions
        assert added == len(hypothesis) - len(reference)
        assert counts.word_substitutions + counts.word_deletions <= counts.words == len(reference)
