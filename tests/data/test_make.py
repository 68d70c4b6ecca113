"""Parquet shards from a folder of audio files."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from clips import encode, tone

from muster.data import corpus
from muster.data.speech.folder import read_metadata
from muster.data.speech.make import make
from muster.data.speech.source import SpeechLimits, SpeechSource
from muster.errors import DataError

TEXTS = ["one, two", 'three "four"', "five", "six", "seven"]


@pytest.fixture
def folder(tmp_path):
    """Five clips of 0.2 s to 0.6 s in wavs/."""
    (tmp_path / "in" / "wavs").mkdir(parents=True)
    for i in range(5):
        (tmp_path / "in" / "wavs" / f"{i}.wav").write_bytes(encode(tone(0.2 + 0.1 * i)))
    return tmp_path / "in"


def write_csv(folder: Path, encoding: str = "utf-8") -> None:
    quoted = ['"' + text.replace('"', '""') + '"' for text in TEXTS]
    lines = ["file_name,text", *(f"wavs/{i}.wav,{text}" for i, text in enumerate(quoted))]
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n", encoding=encoding)


def write_jsonl(folder: Path, rows: list | None = None) -> None:
    rows = rows or [{"path": f"wavs/{i}.wav", "sentence": text} for i, text in enumerate(TEXTS)]
    (folder / "metadata.jsonl").write_text("\n\n".join(json.dumps(row) for row in rows))


@pytest.mark.parametrize("write", [write_csv, write_jsonl])
def test_what_was_made_can_be_trained_on(folder, tmp_path, write):
    write(folder)
    (made,) = make(folder, tmp_path / "out", "train", shard_mb=100)
    assert made.name == "train-00000-of-00001.parquet"
    source = SpeechSource(
        corpus.files(str(tmp_path / "out"), "data.train", "train"), SpeechLimits()
    )
    assert list(source.texts) == TEXTS
    assert source.lengths == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6])
    for i in range(5):
        assert abs(source.load(i).samples - tone(0.2 + 0.1 * i)).max() < 1e-4
    table = pq.read_table(made)
    assert table.column("duration").to_pylist() == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6])
    assert table.column("audio")[1].as_py()["path"] == "1.wav"


def test_a_csv_from_a_spreadsheet_is_read(folder):
    write_csv(folder, encoding="utf-8-sig")
    assert [text for _, text in read_metadata(folder)] == TEXTS


def test_shards_hold_at_most_their_size_and_everything_in_order(folder, tmp_path):
    write_csv(folder)
    size = 0.036  # MB; the clips are of 6.4 kB to 19.2 kB
    shards = make(folder, tmp_path / "out", "test", shard_mb=size)
    assert [path.name for path in shards] == [f"test-0000{i}-of-00002.parquet" for i in range(2)]
    assert sorted((tmp_path / "out").iterdir()) == shards
    texts = []
    for path in shards:
        table = pq.read_table(path)
        texts += table.column("text").to_pylist()
        assert sum(len(cell["bytes"]) for cell in table.column("audio").to_pylist()) <= size * 1e6
    assert texts == TEXTS


def test_a_clip_larger_than_a_shard_has_one_of_its_own(folder, tmp_path):
    write_csv(folder)
    assert len(make(folder, tmp_path / "out", "train", shard_mb=0.001)) == 5


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda clip: clip.unlink(), "no such file"),
        (lambda clip: clip.write_bytes(b"garbage"), "not readable as audio"),
        (lambda clip: clip.write_bytes(encode(tone(0.0))), "zero length"),
    ],
)
def test_one_bad_clip_and_nothing_is_written(folder, tmp_path, damage, words):
    write_csv(folder)
    damage(folder / "wavs" / "3.wav")
    with pytest.raises(DataError, match=rf"1 of 5 clips .*nothing was written: 3\.wav: {words}"):
        make(folder, tmp_path / "out", "train", shard_mb=100)
    assert not (tmp_path / "out").exists()


def test_shards_that_exist_are_never_touched(folder, tmp_path):
    write_csv(folder)
    (made,) = make(folder, tmp_path / "out", "train", shard_mb=100)
    before = made.read_bytes()
    with pytest.raises(DataError, match=r"already has train-00000-of-00001\.parquet"):
        make(folder, tmp_path / "out", "train", shard_mb=0.01)
    assert [p.read_bytes() for p in (tmp_path / "out").iterdir()] == [before]
    make(folder, tmp_path / "out", "validation", shard_mb=100)


def test_a_folder_without_metadata_says_what_to_write(tmp_path):
    with pytest.raises(
        DataError, match=r"no metadata\.csv or metadata\.jsonl; .*file_name and text"
    ):
        read_metadata(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("csv", "", "has no rows"),
        ("csv", "file_name,text\n", "has no rows"),
        ("csv", "name,text\na.wav,x\n", "none of the columns file_name.* it has name, text"),
        ("csv", "file_name,words\na.wav,x\n", "none of the columns text.* it has file_name, words"),
        ("csv", "file_name,text\na.wav,x\nb.wav\n", "line 3: text is None"),
        ("csv", b"file_name,text\na.wav,\xe9t\xe9\n", "not UTF-8"),
        ("jsonl", '{"file": "a.wav", "text": "x"}\n{"file": ', "line 2: not a JSON object"),
        ("jsonl", '{"file": "a.wav", "text": "x"}\n\n7', "line 3: not a JSON object"),
        ("jsonl", '{"file": "a.wav", "text": "x"}\n{"file": "b.wav"}', "line 2: text is None"),
        ("jsonl", '{"file": "a.wav", "text": 5}', "line 1: text is 5, expected a string"),
    ],
)
def test_metadata_that_cannot_be_used_names_file_and_line(tmp_path, name, content, words):
    path = tmp_path / f"metadata.{name}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=words) as error:
        read_metadata(tmp_path)
    assert str(path) in str(error.value)


def test_a_target_that_is_a_file_is_refused(folder, tmp_path):
    write_csv(folder)
    (tmp_path / "out").touch()
    with pytest.raises(DataError, match="cannot make the folder"):
        make(folder, tmp_path / "out", "train", shard_mb=100)
