"""Rows of parquet files, and the index of durations beside them."""

import json
import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clips import AUDIO, encode, tone, write_parquet

from muster.data import cache, corpus, parquet
from muster.data.speech import audio
from muster.data.speech.files import AudioFiles, ClipRow
from muster.data.speech.source import SpeechLimits, SpeechSource
from muster.errors import DataError

SPANS = [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]


@pytest.fixture
def measured(monkeypatch):
    """Every clip whose header is read from here on."""
    seen = []
    header = audio.header
    monkeypatch.setattr(audio, "header", lambda clip: seen.append(clip) or header(clip))
    return seen


def rows_of(path: Path, *columns: str) -> list[ClipRow]:
    return list(AudioFiles([path], *columns).read_rows())


def spans(path: Path) -> list[float]:
    return [row.seconds for row in rows_of(path)]


def index_of(path: Path) -> Path:
    return path.parent / ".muster-index" / f"{path.name}.json"


@pytest.mark.parametrize("rows_per_group", [1, 3, 100])
def test_rows_are_found_in_every_row_group(corpus_file, rows_per_group):
    path = corpus_file(rows_per_group=rows_per_group)
    files = AudioFiles([path])
    rows = files.read_rows()
    assert [row.seconds for row in rows] == pytest.approx(SPANS)
    assert [row.text for row in rows[2:4]] == ["clip c", "clip d"]
    assert [row.number for row in rows] == list(range(7))
    assert files.groups(rows).tolist() == [i // rows_per_group for i in range(7)]
    for row, span in zip(rows, SPANS, strict=True):
        assert audio.seconds(files.clip(row)) == pytest.approx(span)


def test_rows_of_several_files_follow_each_other(corpus_file):
    one, two = corpus_file("train-0.parquet", 2), corpus_file("train-1.parquet", 3)
    files = AudioFiles([one, two])
    rows = files.read_rows()
    assert [(row.file, row.number) for row in rows] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    assert audio.seconds(files.clip(rows[4])) == pytest.approx(0.4)
    assert files.groups(rows).tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), AUDIO])
def test_audio_may_be_the_name_of_a_file_beside_the_parquet_file(tmp_path, kind):
    (tmp_path / "wavs").mkdir()
    (tmp_path / "wavs" / "a.wav").write_bytes(encode(tone(0.3)))
    (tmp_path / "b.wav").write_bytes(encode(tone(0.4)))
    names = ["wavs/a.wav", str(tmp_path / "b.wav")]
    cells = [{"bytes": None, "path": name} for name in names] if kind == AUDIO else names
    path = write_parquet(tmp_path / "train.parquet", cells, ["a", "b"], kind)
    assert spans(path) == pytest.approx([0.3, 0.4])


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_audio_may_be_plain_bytes(tmp_path, kind):
    clips = [encode(tone(0.3)), encode(tone(0.4), container="FLAC")]
    path = write_parquet(tmp_path / "train.parquet", clips, ["a", "b"], kind)
    assert spans(path) == pytest.approx([0.3, 0.4])


def test_row_groups_without_rows_are_stepped_over(tmp_path):
    schema = pa.schema([("audio", pa.binary()), ("text", pa.string())])
    with pq.ParquetWriter(tmp_path / "a.parquet", schema) as writer:
        for clips in ([], [encode(tone(0.2))], [], [encode(tone(0.3))], []):
            writer.write_table(pa.table([clips, ["x"] * len(clips)], schema=schema))
    files = AudioFiles([tmp_path / "a.parquet"])
    rows = files.read_rows()
    assert [audio.seconds(files.clip(row)) for row in rows] == pytest.approx([0.2, 0.3])
    assert files.groups(rows).tolist() == [1, 3]


def test_columns_are_found_by_name_and_type_or_named_by_the_recipe(tmp_path):
    table = pa.table(
        {
            "path": ["nowhere"],
            "text": pa.array([7]),
            "sentence": ["hello"],
            "speech": pa.array([encode(tone(0.2))]),
            "other": ["bye"],
        }
    )
    path = tmp_path / "a.parquet"
    schema = table.schema
    assert parquet.find_columns(path, schema, None, None) == ("speech", "sentence")
    assert parquet.find_columns(path, schema, "path", "other") == ("path", "other")
    names = pa.schema([("file", pa.string()), ("text", pa.string())])
    assert parquet.find_columns(path, names, None, None) == ("file", "text")


@pytest.mark.parametrize(
    ("columns", "asked", "words"),
    [
        ({"sound": ["a"], "text": ["a"]}, (None, None), r"no audio column .*data\.audio_column=…"),
        ({"audio": [b"a"], "words": ["a"]}, (None, None), r"no text column .*data\.text_column=…"),
        ({"audio": [1], "text": ["a"]}, (None, None), r"no audio column .*audio \(int64\)"),
        (
            {"audio": [b"a"], "text": ["a"]},
            ("mp3", None),
            r"data\.audio_column: .* no column 'mp3'",
        ),
        (
            {"audio": [b"a"], "text": ["a"]},
            (None, "said"),
            r"data\.text_column: .*no column 'said'",
        ),
        ({"audio": [b"a"], "n": [1]}, (None, "n"), r"data\.text_column: 'n' of .* holds no text"),
        ({"n": [1], "text": ["a"]}, ("n", None), r"data\.audio_column: 'n' of .* holds no audio"),
    ],
)
def test_a_missing_column_names_file_key_and_what_there_is(tmp_path, columns, asked, words):
    path = tmp_path / "bad.parquet"
    pq.write_table(pa.table(columns), path)
    with pytest.raises(DataError, match=words) as error:
        AudioFiles([path], *asked)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("broken", [b"", b"no parquet at all", b"PAR1" + b"\0" * 50 + b"PAR1"])
def test_a_file_that_is_no_parquet_is_named(tmp_path, broken):
    path = tmp_path / "bad.parquet"
    path.write_bytes(broken)
    with pytest.raises(DataError, match=r"bad\.parquet is not a readable parquet file"):
        AudioFiles([path])
    with pytest.raises(DataError, match=r"gone\.parquet is not a readable parquet file"):
        AudioFiles([tmp_path / "gone.parquet"])


@pytest.mark.parametrize("column", [0, 1])
def test_a_row_group_damaged_inside_is_a_problem_of_its_rows(tmp_path, column):
    clips = [encode(tone(0.2 + 0.1 * i)) for i in range(8)]
    path = write_parquet(tmp_path / "bad.parquet", clips, list("abcdefgh"), pa.binary())
    chunk = pq.ParquetFile(path).metadata.row_group(1).column(column)
    begin = chunk.dictionary_page_offset or chunk.data_page_offset
    data = bytearray(path.read_bytes())
    data[begin : begin + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(data)
    rows = rows_of(path)
    assert [row.problem is None for row in rows] == [True] * 3 + [False] * 3 + [True] * 2
    words = rf"bad\.parquet, row group 1, column {('audio', 'text')[column]}: "
    assert all(re.search(words, row.problem) for row in rows[3:6])
    said = list("abc") + (list("def") if column == 0 else [""] * 3) + list("gh")
    assert [row.text for row in rows] == said
    with pytest.raises(DataError, match=rf"3 of 8 rows cannot be read \(.*{words}"):
        SpeechSource([path], SpeechLimits())
    made = SpeechSource([path], SpeechLimits(max_bad_fraction=0.5))
    assert [row.number for row in made.rows] == [0, 1, 2, 6, 7]
    assert not any(made.load(i).broken for i in range(5))


def test_files_without_rows_are_named(tmp_path):
    path = write_parquet(tmp_path / "none.parquet", [], [])
    with pytest.raises(DataError, match=r"no rows in .*none\.parquet"):
        rows_of(path)


def test_rows_that_cannot_be_read_say_why(tmp_path):
    clips = [
        encode(tone(0.2)),
        b"garbage",
        {"bytes": None, "path": None},
        {"bytes": None, "path": "gone.wav"},
        {"bytes": None, "path": "a" * 5000},
        encode(tone(0.0)),
        None,
    ]
    path = write_parquet(tmp_path / "a.parquet", clips, ["x"] * 7)
    problems = [row.problem for row in rows_of(path)]
    assert problems[0] is None
    assert "not readable as audio" in problems[1]
    assert problems[2] == "the audio cell is empty"
    assert problems[3] == "the audio file gone.wav does not exist"
    assert "does not exist" in problems[4]
    assert len(problems[4]) < 300
    assert problems[5] == "the clip has zero length"
    assert problems[6] == "the audio cell is empty"


def test_the_index_is_written_beside_the_data_and_used_again(corpus_file, measured):
    path = corpus_file()
    first = rows_of(path)
    assert len(measured) == 7
    assert [p.name for p in index_of(path).parent.iterdir()] == ["train.parquet.json"]
    assert rows_of(path) == first
    assert len(measured) == 7, "the second look decodes nothing"


def test_a_file_that_changes_is_measured_again(corpus_file, measured):
    path = corpus_file()
    rows_of(path)
    corpus_file(count=3)
    assert spans(path) == pytest.approx(SPANS[:3])
    assert len(measured) == 10
    later = path.stat().st_mtime_ns + 1
    os.utime(path, ns=(later, later))
    rows_of(path)
    assert len(measured) == 13


def test_another_audio_column_has_durations_of_its_own(tmp_path):
    table = pa.table(
        {"audio": [encode(tone(0.2))], "wav": [encode(tone(0.4))], "text": pa.array(["a"])}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    for column, expected in (("audio", 0.2), ("wav", 0.4), ("audio", 0.2)):
        (row,) = rows_of(tmp_path / "a.parquet", column)
        assert row.seconds == pytest.approx(expected)


@pytest.mark.parametrize("damage", ["", "{", '{"of": 1}'])
def test_a_damaged_index_is_made_again(corpus_file, damage, measured):
    path = corpus_file()
    rows_of(path)
    index_of(path).write_text(damage)
    assert spans(path) == pytest.approx(SPANS)
    assert len(measured) == 14
    assert json.loads(index_of(path).read_text())["clips"]["seconds"][0] == 0.2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("seconds", value) for value in (-1.0, float("nan"), 1e308, 0.0, "x", None, [1.0])),
        *(("problems", value) for value in ({"99": "x"}, {"0": "x"}, {"x": "y"}, [1], None)),
        *(("files", value) for value in ({"0": ["a\0b", 1, 2, "k"]}, {"0": [1]}, {"-1": []})),
        ("unsettled", [99]),
        ("kinds", {"FLAC": "x"}),
    ],
)
def test_a_poisoned_index_is_made_again(corpus_file, key, value):
    path = corpus_file()
    rows_of(path)
    saved = json.loads(index_of(path).read_text())
    if key == "seconds":
        saved["clips"][key][0] = value
    else:
        saved["clips"][key] = value
    index_of(path).write_text(json.dumps(saved))
    assert spans(path) == pytest.approx(SPANS)


def test_a_transcript_that_is_not_utf8_names_file_and_row(tmp_path, caplog):
    texts = pa.array([b"one", b"t\xffo", b"three"], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 3, texts.buffers())
    pq.write_table(
        pa.table({"audio": [encode(tone(0.2))] * 3, "text": texts}), tmp_path / "a.parquet"
    )
    source = SpeechSource([tmp_path / "a.parquet"], SpeechLimits(max_bad_fraction=0.5))
    assert [*source.texts] == ["one", "three"]
    assert "a.parquet row 1: the text is not UTF-8 (byte 0xff)" in caplog.text


def test_where_the_folder_takes_no_index_the_cache_does(
    corpus_file, measured, tmp_path, monkeypatch
):
    path = corpus_file()
    (path.parent / ".muster-index").touch()  # a file where the folder would be
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows_of(path)
    (kept,) = (tmp_path / "cache" / "muster" / "index").iterdir()
    assert kept.name.startswith("train-")
    rows_of(path)
    assert len(measured) == 7


def test_files_of_the_same_name_share_no_place_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for folder, span in (("a", 0.2), ("b", 0.5)):
        path = write_parquet(tmp_path / folder / "t.parquet", [encode(tone(span))], ["x"])
        (path.parent / ".muster-index").touch()
        assert spans(path) == pytest.approx([span])
    assert len(list((tmp_path / "cache" / "muster" / "index").iterdir())) == 2


def test_where_nothing_can_be_written_durations_are_found_all_the_same(
    corpus_file, tmp_path, monkeypatch, caplog
):
    path = corpus_file()
    (path.parent / ".muster-index").touch()
    (tmp_path / "cache").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert spans(path) == pytest.approx(SPANS)
    assert "could not save the index" in caplog.text


def test_a_half_written_index_leaves_nothing_behind(corpus_file, monkeypatch, tmp_path):
    path = corpus_file()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    index_of(path).mkdir(parents=True)  # the last move fails
    rows_of(path)
    assert [p.name for p in (path.parent / ".muster-index").iterdir()] == ["train.parquet.json"]


@pytest.mark.parametrize("unset", [{"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}])
def test_a_cache_folder_is_never_made_where_the_command_was_typed(unset, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, value in unset.items():
        monkeypatch.setenv(name, value)
    for place in cache.index_paths(tmp_path / "a.parquet"):
        assert place.is_absolute()


def test_the_package_is_never_written_to(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (path,) = corpus.sibling_split("embedded:spoken-numbers", "validation")
    before = sorted(path.parent.iterdir())
    rows_of(path)
    assert sorted(path.parent.iterdir()) == before
    assert len(list((tmp_path / "cache" / "muster" / "index").iterdir())) == 1


def test_a_named_file_that_was_mended_is_no_longer_a_problem(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ["x.wav"], ["a"], pa.string())
    assert rows_of(path)[0].problem
    (tmp_path / "x.wav").write_bytes(encode(tone(0.3)))
    assert rows_of(path)[0].problem is None


def test_problems_inside_the_file_are_remembered(tmp_path, measured):
    path = write_parquet(tmp_path / "a.parquet", [b"garbage", encode(tone(0.2))], ["a", "b"])
    first = rows_of(path)
    assert rows_of(path) == first
    assert len(measured) == 2


def test_row_groups_are_kept_within_their_budget(corpus_file):
    path = corpus_file(rows_per_group=1)
    files = AudioFiles([path])
    rows = files.read_rows()
    sizes = [files.tables[0].read(group).nbytes for group in range(7)]
    files.row_groups.budget = sizes[0] + sizes[1]
    for row in (*rows, *rows[:2]):
        files.clip(row)
    assert sorted(files.row_groups._cache) == [(0, 0), (0, 1)]
    assert files.row_groups._bytes == sizes[0] + sizes[1]
    files.clip(rows[0])
    files.clip(rows[6])
    assert list(files.row_groups._cache)[-1] == (0, 6), "the one in use stays, however large"
