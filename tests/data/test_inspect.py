"""What `muster data inspect` counts."""

import pytest
from clips import encode, tone, write_parquet

from muster.data.inspect import inspect


def test_each_split_is_summed_up(tmp_path):
    spans, texts = [0.5, 1.0, 1.5, 3.0], ["one two", "two  two", "Three", "one"]
    clips = [encode(tone(span)) for span in spans]
    write_parquet(tmp_path / "c" / "train-0.parquet", clips, texts)
    write_parquet(tmp_path / "c" / "train-1.parquet", [b"garbage"], ["never"])
    write_parquet(tmp_path / "c" / "test.parquet", clips[:1], ["x"])
    train, test = inspect(str(tmp_path / "c"))
    assert (train.split, train.files, train.clips, train.unreadable) == ("train", 2, 4, 1)
    assert train.hours == pytest.approx(6 / 3600)
    assert train.seconds == pytest.approx((0.5, 1.25, 2.775, 3.0))
    assert train.words == 6
    assert train.vocabulary == 3
    assert train.common[0] == ("two", 3)
    assert train.characters == " Tehnortw"
    assert sum(count for _, _, count in train.histogram) == 4
    assert (train.histogram[0][0], train.histogram[-1][1]) == (0.5, 3.0)
    assert (test.split, test.clips) == ("test", 1)


def test_a_single_file_is_one_whole(corpus_file):
    (summary,) = inspect(str(corpus_file("train.parquet")))
    assert (summary.split, summary.files, summary.clips) == ("all", 1, 7)


def test_a_corpus_that_cannot_be_read_at_all_is_still_summed_up(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [b"x", b"y"], ["a", "b"])
    (summary,) = inspect(str(path))
    assert (summary.clips, summary.unreadable, summary.hours) == (0, 2, 0.0)
    assert sum(count for _, _, count in summary.histogram) == 0
