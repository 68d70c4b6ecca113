"""What `muster data inspect` counts."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clips import encode, tone, write_parquet
from PIL import Image
from typer.testing import CliRunner

from muster.cli import app
from muster.data.inspect import content_of, inspect
from muster.errors import DataError


def parts(spec, *options):
    return inspect(str(spec), *options)[0]


def detail(part, beginning: str) -> str:
    (found,) = [line for line in part.details if line.startswith(beginning)]
    return found


def test_each_split_is_summed_up(tmp_path):
    spans, texts = [0.5, 1.0, 1.5, 3.0], ["one two", "two  two", "Three", "one"]
    clips = [encode(tone(span)) for span in spans]
    write_parquet(tmp_path / "c" / "train-0.parquet", clips, texts)
    write_parquet(tmp_path / "c" / "train-1.parquet", [b"garbage"], ["never"])
    write_parquet(tmp_path / "c" / "test.parquet", clips[:1], ["x"])
    train, test = parts(tmp_path / "c")
    assert (train.split, train.files, train.count, train.unreadable) == ("train", 2, 4, 1)
    assert train.heading == "train: 4 clips, 0.1 min, 2 file(s)"
    assert train.lengths == pytest.approx((0.5, 1.25, 2.775, 3.0))
    assert detail(train, "words") == "words: 6, 3 different; characters: ' Tehnortw'"
    assert detail(train, "most common").startswith("most common: two 3")
    assert sum(count for _, _, count in train.histogram) == 4
    assert (train.histogram[0][0], train.histogram[-1][1]) == (0.5, 3.0)
    assert (test.split, test.count) == ("test", 1)
    assert test.in_train == {0: 0}
    assert not train.in_train


def test_a_single_file_is_one_whole(corpus_file):
    (summary,) = parts(corpus_file("train.parquet"))
    assert (summary.split, summary.files, summary.count) == ("all", 1, 7)


def test_a_corpus_that_cannot_be_read_at_all_is_still_summed_up(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [b"x", b"y"], ["a", "b"])
    (summary,) = parts(path)
    assert (summary.count, summary.unreadable, summary.amount) == (0, 2, "0.0 min")
    assert summary.histogram == []
    (line,) = summary.problems
    assert line.startswith("2 × not readable as audio")


def test_how_a_corpus_is_stored_and_what_is_wrong_with_it_is_told(tmp_path):
    clips = [encode(tone(0.5)), encode(tone(0.9, rate=8000), 8000, "FLAC"), b"garbage", None]
    path = write_parquet(tmp_path / "train.parquet", clips, list("abcd"))
    told = []
    (summary,) = parts(path, None, lambda done, total: told.append((done, total)))
    assert "columns: audio struct<bytes: binary, path: string>, text string" in summary.details
    assert set(detail(summary, "audio: ")[7:].split(", ")) == {
        "FLAC 8000 Hz × 1",
        "WAV 16000 Hz × 1",
    }
    assert detail(summary, "row groups").startswith("row groups: 2, largest 0.0 MB")
    assert summary.longest == "train.parquet row 1"
    unreadable, empty = summary.problems
    assert unreadable.startswith("train.parquet row 2: not readable as audio")
    assert empty == "train.parquet row 3: the audio cell is empty"
    assert told[-1] == (4, 4)


def test_decoding_finds_bodies_that_break(tmp_path):
    flac = encode(np.random.default_rng(0).standard_normal(16000) * 0.1, container="FLAC")
    path = write_parquet(tmp_path / "train.parquet", [flac, flac[: len(flac) // 2]], ["a", "b"])
    assert parts(path)[0].unreadable == 0
    assert parts(path, None, None, True)[0].problems[0].startswith("train.parquet row 1")
    assert parts(path)[0].unreadable == 1


def test_a_folder_of_clips_is_summed_up_and_what_is_not_in_it_told(tmp_path):
    (tmp_path / "a.wav").write_bytes(encode(tone(0.5)))
    (tmp_path / "b.wav").write_bytes(encode(tone(0.5)))
    (tmp_path / "metadata.csv").write_text("file_name,text\na.wav,one two\nb.wav,three\n")
    (tmp_path / "notes.md").touch()
    (summary,), remarks = inspect(str(tmp_path))
    assert (summary.split, summary.count) == ("all", 2)
    assert detail(summary, "words").startswith("words: 3")
    assert "columns: metadata.csv: file_name, text" in summary.details
    assert list(summary.twins) == [1]
    assert remarks[0].endswith("notes.md")


def test_text_is_summed_up_with_its_duplicates(tmp_path):
    rows = ["a text of one line", "b" * 40, "a text of one line", "", "c" * 5000]
    lines = [json.dumps({"text": text}) for text in rows] + ["no json"]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "test.txt").write_text("b" * 40)
    train, test = parts(tmp_path)
    assert train.heading == "train: 5 documents, 0.01 MB of text, 1 file(s)"
    assert train.lengths[1:] == (18, pytest.approx(4008.0), 5000)
    assert train.twins == {2: 0}
    assert train.duplicates()[0].startswith("1 duplicates: ")
    assert test.in_train == {0: 1}
    assert train.unreadable == 1
    assert "1 empty, which training leaves out" in train.details
    assert sum(n for _, _, n in train.histogram) == 5
    assert train.longest.endswith("train.jsonl row 4")


def test_chat_rows_are_summed_up_by_turns(tmp_path):
    turn = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
    rows = [{"messages": turn}, {"messages": [*turn, *turn]}, {"messages": turn}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (summary,) = parts(tmp_path)
    assert (summary.what, summary.count, summary.twins) == ("conversations", 3, {2: 0})
    assert summary.details == ["turns: user 4, assistant 4"]
    (alone,) = parts(tmp_path / "a.jsonl")
    assert (alone.what, alone.count) == ("conversations", 3)


def test_images_are_summed_up_by_class_and_size(tmp_path):
    rng, cells = np.random.default_rng(0), []
    for side, form in ((8, "PNG"), (16, "PNG"), (64, "JPEG")):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (side, side, 3), np.uint8)).save(file, form)
        cells.append({"bytes": file.getvalue()})
    table = pa.table({"image": [*cells, cells[0]], "label": ["cat", "dog", "cat", "cat"]})
    pq.write_table(table, tmp_path / "train.parquet")
    pq.write_table(table.slice(1, 1), tmp_path / "test.parquet")
    train, test = parts(tmp_path)
    assert train.heading == "train: 4 images, 2 classes, colour, 1 file(s)"
    assert train.details == ["classes: cat 3, dog 1"]
    assert train.lengths == (8, 12, pytest.approx(56.8), 64)
    assert train.twins == {3: 0}
    assert test.in_train == {0: 1}


@pytest.mark.parametrize(
    ("spec", "content"),
    [
        ("embedded:spoken-numbers", "speech"),
        ("embedded:digits", "images"),
        ("embedded:python-source", "text"),
    ],
)
def test_what_a_corpus_holds_is_told_by_its_files(spec, content):
    assert content_of(spec) == content


def test_the_command_shows_one_table_and_a_histogram(tmp_path):
    for n, length in enumerate((5, 30, 30)):
        (tmp_path / f"{n}.txt").write_text(str(n) * length)
    (tmp_path / "training.txt").write_text("1" * 30)
    result = CliRunner().invoke(app, ["data", "inspect", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "duplicates" in result.output
    assert "all: 4 documents, 0.00 MB of text, 4 file(s)" in result.output
    assert "█" in result.output
    assert "training.txt: no split by the name alone" in result.output


def test_several_places_are_one_corpus_with_the_splits_that_training_would_read(tmp_path):
    files = {"a/train.txt": "a" * 9, "a/test.txt": "same", "b/one.txt": "same", "b/two.txt": "c"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    both = [str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "a")]
    train, test = inspect(both)[0]
    assert (train.split, train.files, test.split, test.files) == ("train", 3, "test", 1)
    assert test.in_train == {0: 1}
    named = [str(tmp_path / name) for name in ("a/test.txt", "a/train.txt")]
    assert [part.split for part in inspect(named)[0]] == ["train", "test"]
    shards = [str(tmp_path / "b" / name) for name in ("one.txt", "two.txt")]
    assert [(part.split, part.files) for part in inspect(shards)[0]] == [("all", 2)]
    with pytest.raises(
        DataError, match=r"holds text, .* holds speech; look at each kind by itself"
    ):
        inspect([shards[0], "embedded:spoken-numbers"])


def test_the_table_fits_a_line_of_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, ["data", "inspect", "embedded:spoken-numbers"]).output
    table = [line for line in shown.splitlines() if line.startswith("│")]
    cells = {
        row[1].strip(): [cell.strip() for cell in row[2:-1]]
        for row in (li.split("│") for li in table)
    }
    assert "…" not in "".join(table)
    assert max(map(len, table)) <= 80
    assert list(cells) == [
        "files", "clips", "shortest, in seconds", "median", "95 % are at most", "longest",
        "unreadable", "duplicates", "also in train",
    ]  # fmt: skip
    assert cells["also in train"] == ["", "0", "0"]


def test_a_histogram_of_many_samples_fits_a_line_of_80_columns(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "train.jsonl").write_text('{"text": "word"}\n' * 10_000)
    shown = CliRunner().invoke(app, ["data", "inspect", str(tmp_path)]).output.splitlines()
    (line,) = (line for line in shown if "█" in line)
    assert line.endswith("█ 10,000")
    assert len(line) == 80
