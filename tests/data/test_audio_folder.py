"""A folder of audio files with a metadata file is a corpus like any other."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from clips import encode, tone, write_parquet

from muster.data import corpus
from muster.data.speech import audio
from muster.data.speech.source import SpeechLimits, SpeechSource
from muster.errors import DataError


@pytest.fixture
def folder(tmp_path):
    """`folder("train", ["a", "b"], "csv")`: clips of 0.2 s, 0.3 s … in clips/, and who says what."""

    def make(name: str, texts: list[str], kind: str = "csv", key: str = "transcription") -> Path:
        place = tmp_path / "speech" / name
        (place / "clips").mkdir(parents=True, exist_ok=True)
        for i in range(len(texts)):
            container = ("WAV", "FLAC", "OGG", "MP3")[i % 4]
            data = encode(tone(0.2 + 0.1 * i), container=container)
            (place / "clips" / f"{i}.{container.lower()}").write_bytes(data)
        names = sorted(f"clips/{path.name}" for path in (place / "clips").iterdir())
        rows = [{"file_name": n, key: text} for n, text in zip(names, texts, strict=True)]
        if kind == "csv":
            lines = [f"file_name,{key},speaker", *(f"{r['file_name']},{r[key]},x" for r in rows)]
        else:
            lines = [json.dumps(row) for row in rows]
        (place / f"metadata.{kind}").write_text("\n".join(lines))
        return tmp_path / "speech"

    return make


def read(spec: Path, split: corpus.Split = "train", **limits) -> SpeechSource:
    return SpeechSource(corpus.files(str(spec), "data.train", split), SpeechLimits(**limits))


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("key", ["transcription", "text", "sentence"])
def test_clips_and_texts_of_a_folder_are_read(folder, kind, key):
    made = read(folder("", ["one", "two", "three", "four"], kind, key))
    assert list(made.texts) == ["one", "two", "three", "four"]
    assert made.lengths == pytest.approx([0.2, 0.3, 0.4, 0.5], abs=0.1)
    assert np.abs(made.load(1).samples - tone(0.3)).max() < 1e-4
    assert made.name(1).endswith(f"speech/metadata.{kind} row 1 (clips/1.flac)")


def test_split_folders_are_splits(folder):
    folder("train", ["a", "b", "c"])
    folder("en/dev-clean", ["d"], "jsonl")
    spec = folder("test", ["e", "f"])
    assert list(read(spec).texts) == ["a", "b", "c"]
    assert list(read(spec, "test").texts) == ["e", "f"]
    (found,) = corpus.sibling_split(str(spec), "validation")
    assert found == spec / "en" / "dev-clean" / "metadata.jsonl"
    assert list(read(f"{spec}/t*/metadata.csv").texts) == ["e", "f", "a", "b", "c"]
    assert list(read(spec / "test" / "metadata.csv").texts) == ["e", "f"]


def test_max_files_counts_metadata_files_too(folder):
    folder("train/a", ["a"])
    spec = str(folder("train/b", ["b"]))
    assert [p.parent.name for p in corpus.files(spec, "data.train", "train", 1)] == ["a"]
    assert len(corpus.files(spec, "data.train", "train")) == 2


def test_parquet_goes_before_the_clips_it_may_be_made_of(folder):
    spec = folder("train", ["a", "b"])
    path = write_parquet(spec / "train.parquet", [encode(tone(0.2))], ["from parquet"])
    assert corpus.files(str(spec), "data.train", "train") == [path]


def test_a_folder_with_both_metadata_files_is_read_once(folder):
    folder("", ["a", "b"], "jsonl")
    spec = folder("", ["c", "d"], "csv")
    assert list(read(spec).texts) == ["c", "d"]


def test_other_csv_files_are_no_metadata(folder):
    spec = folder("train", ["a"])
    (spec / "train" / "speaker_metadata.csv").write_text("name\nx")
    (spec / "train" / "notes.csv").write_text("name\nx")
    assert len(corpus.files(str(spec), "data.train", "train")) == 1
    assert len(corpus.files(f"{spec}/train/*", "data.train", "train")) == 1


def test_one_metadata_file_over_several_splits_is_refused(folder):
    spec = folder("", ["a", "b"])
    rows = "file_name,text\ntrain/0.wav,a\ntest/1.wav,b\n"
    (spec / "metadata.csv").write_text(rows)
    with pytest.raises(DataError, match=r"several splits \(test, train\); put a metadata\.csv"):
        read(spec)


def test_columns_may_be_named_by_the_recipe(folder):
    spec = folder("", ["a"])
    (spec / "metadata.csv").write_text("where,said,text\nclips/0.wav,yes,no\n")
    files = corpus.files(str(spec), "data.train", "train")
    made = SpeechSource(files, SpeechLimits(), "where", "said")
    assert list(made.texts) == ["yes"]
    with pytest.raises(DataError, match=r"data\.text_column: .* no column 'heard'; it has where"):
        SpeechSource(files, SpeechLimits(), "where", "heard")


def test_a_missing_file_is_a_bad_row_until_it_is_there(folder):
    spec = folder("", ["a", "b", "c"])
    data = (spec / "clips" / "1.flac").read_bytes()
    (spec / "clips" / "1.flac").unlink()
    words = r"speech/metadata\.csv row 1 \(clips/1\.flac\): the audio file clips/1\.flac does not"
    with pytest.raises(DataError, match=rf"1 of 3 rows cannot be read \({words}"):
        read(spec)
    assert read(spec, max_bad_fraction=0.5).left_out == {"unreadable": 1}
    (spec / "clips" / "1.flac").write_bytes(data)
    assert len(read(spec)) == 3


def test_clips_in_files_of_their_own_come_in_any_order(folder):
    made = read(folder("", list("abc")), shuffle="groups")
    assert made.groups is None
    assert made.fingerprint() == b""


def test_beside_a_parquet_file_they_are_groups_of_their_own(folder):
    spec = folder("", list("abc"))
    path = write_parquet(spec / "x.parquet", [encode(tone(0.2))] * 4, ["x"] * 4)
    paths = [path, spec / "metadata.csv"]
    made = SpeechSource(paths, SpeechLimits(shuffle="groups"))
    assert made.groups.tolist() == [0, 0, 0, 1, 2, 3, 4]


def test_a_clip_replaced_by_another_is_measured_again_and_no_other(folder, monkeypatch):
    spec = folder("", list("abc"))
    first = read(spec)
    assert first.files.kinds == {"WAV 16000 Hz": 1, "FLAC 16000 Hz": 1, "OGG 16000 Hz": 1}
    seen, header = [], audio.header
    monkeypatch.setattr(audio, "header", lambda clip: seen.append(clip.name) or header(clip))
    (spec / "clips" / "1.flac").write_bytes(encode(tone(2.0), container="WAV"))
    again = read(spec)
    assert seen == ["1.flac"]
    assert again.lengths == pytest.approx([first.lengths[0], 2.0, first.lengths[2]])
    assert again.files.kinds == {"WAV 16000 Hz": 2, "OGG 16000 Hz": 1}
    assert len(again.load(1).samples) == 32000
    os.utime(spec / "clips" / "0.wav", ns=(1, 1))
    for _ in range(2):  # what was found out is kept, where the length stays the same too
        assert read(spec).lengths.tolist() == again.lengths.tolist()
    assert seen == ["1.flac", "0.wav"]
    (spec / "clips" / "0.wav").unlink()
    with pytest.raises(
        DataError, match=r"row 0 \(clips/0\.wav\): the audio file .* does not exist"
    ):
        read(spec)


def test_a_folder_that_moves_takes_its_index_along(folder, monkeypatch):
    spec = folder("", list("abc"))
    read(spec)
    moved = spec.rename(spec.with_name("elsewhere"))
    monkeypatch.setattr(audio, "header", None)
    assert len(read(moved)) == 3
