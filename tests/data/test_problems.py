"""Rows that cannot be used are told by kind, not one by one."""

import pytest

from muster.data.problems import Problems
from muster.errors import DataError


def many(count: int, why: str = "the text is null") -> Problems:
    problems = Problems()
    for row in range(count):
        problems.add(f"f row {row}", why.format(row=row), f"file {row % 2}")
    return problems


def test_few_problems_are_a_warning_and_many_an_error():
    bad = many(7)
    words = bad.check(700, 0.01, "documents", "data.text_column")
    assert words == (
        "7 of 700 documents cannot be read and are left out: "
        "7 × the text is null: f row 0, row 1, row 2, row 3, row 4 …"
    )
    with pytest.raises(DataError, match=r"7 of 699 .*row 4 …\).*above 0\.010"):
        bad.check(699, 0.01, "documents", "data.text_column")
    with pytest.raises(DataError, match=r"see data\.text_column"):
        bad.check(7, 1.0, "documents", "data.text_column")
    assert Problems().check(0, 0.0, "documents", "") is None


def test_problems_that_differ_in_numbers_and_names_are_one_kind():
    assert len(many(1000, "no valid JSON (char {row})").kinds) == 1
    assert len(many(9, "the audio file '{row}.wav' does not exist").kinds) == 1
    assert len(many(9, "the audio file {row}.wav does not exist").kinds) == 1
    both = many(2)
    both.add("g", "not UTF-8")
    assert str(both) == "2 × the text is null: f row 0, row 1; g: not UTF-8"


def test_problems_are_counted_by_file_and_survive_json():
    bad = many(3)
    assert bad.files == {"file 0": {"the text is null": 2}, "file 1": {"the text is null": 1}}
    assert Problems.from_json(bad.to_json()) == bad
