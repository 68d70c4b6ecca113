"""What `muster data inspect` counts."""

import numpy as np
import pytest
from clips import encode, tone, write_parquet

from muster.data.speech.inspect import inspect


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


def test_how_a_corpus_is_stored_and_what_is_wrong_with_it_is_told(tmp_path):
    clips = [encode(tone(0.5)), encode(tone(0.9, rate=8000), 8000, "FLAC"), b"garbage", None]
    path = write_parquet(tmp_path / "train.parquet", clips, list("abcd"))
    told = []
    (summary,) = inspect(str(path), lambda done, total: told.append((done, total)))
    assert summary.layouts == ["audio struct<bytes: binary, path: string>, text string"]
    assert sorted(summary.kinds) == [("FLAC 8000 Hz", 1), ("WAV 16000 Hz", 1)]
    assert summary.row_groups == 2
    assert 16000 < summary.largest_group < 30000
    assert summary.longest == "train.parquet row 1"
    assert [name for name, _ in summary.problems] == ["train.parquet row 2", "train.parquet row 3"]
    assert "not readable as audio" in summary.problems[0][1]
    assert summary.problems[1][1] == "the audio cell is empty"
    assert told[-1] == (4, 4)


def test_decoding_finds_bodies_that_break(tmp_path):
    flac = encode(np.random.default_rng(0).standard_normal(16000) * 0.1, container="FLAC")
    path = write_parquet(tmp_path / "train.parquet", [flac, flac[: len(flac) // 2]], ["a", "b"])
    assert inspect(str(path))[0].unreadable == 0
    assert inspect(str(path), decode=True)[0].problems[0][0] == "train.parquet row 1"
    assert inspect(str(path))[0].unreadable == 1


def test_a_folder_of_clips_is_summed_up(tmp_path):
    (tmp_path / "a.wav").write_bytes(encode(tone(0.5)))
    (tmp_path / "metadata.csv").write_text("file_name,text\na.wav,one two\n")
    (summary,) = inspect(str(tmp_path))
    assert (summary.split, summary.clips, summary.words) == ("all", 1, 2)
    assert summary.layouts == ["metadata.csv: file_name, text"]
