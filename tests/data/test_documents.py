"""Text, one document at a time, and what is wrong with the rows that have none."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from muster.data import corpus
from muster.data.problems import Problems
from muster.data.text.documents import read_documents
from muster.errors import DataError


def read(path: Path, column: str | None = None) -> tuple[list[tuple[int, str]], Problems]:
    bad = Problems()
    return [(d.row, d.text) for d in read_documents([path], column, bad)], bad


def write_parquet(path: Path, **columns: list) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def test_parquet_gives_every_row_of_the_text_column(tmp_path):
    texts = ["one", "zwei\r\n", "三", "", "fünf"]
    path = write_parquet(tmp_path / "a.parquet", id=[1, 2, 3, 4, 5], sentence=texts)
    assert read(path) == (list(enumerate(texts)), Problems())
    other = write_parquet(tmp_path / "b.parquet", text=["no"] * 5, body=texts)
    assert [text for _, text in read(other, "body")[0]] == texts


def test_null_and_invalid_cells_of_parquet_are_named(tmp_path):
    broken = pa.array([b"fine", b"\xff\xfe", None, b"too"]).view(pa.string())
    pq.write_table(pa.table({"text": broken}), tmp_path / "a.parquet")
    documents, bad = read(tmp_path / "a.parquet")
    assert documents == [(0, "fine"), (3, "too")]
    assert bad.count == 2
    assert "a.parquet row 1: the text is not UTF-8" in str(bad)
    assert str(bad).endswith("a.parquet row 2: the text is null")


def test_parquet_without_the_column_says_which_it_has(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", body=["x"])
    with pytest.raises(DataError, match=r"no text column muster knows.*data\.text_column.*body"):
        read(path)
    with pytest.raises(DataError, match=r"data\.text_column: .*no column 'words'"):
        read(path, "words")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match=r"b\.parquet is not a readable parquet file"):
        read(tmp_path / "b.parquet")


def test_json_lines_skip_blanks_and_name_what_is_no_text(tmp_path):
    lines = [
        json.dumps({"text": "line\u2028break"}, ensure_ascii=False),
        "",
        '{"text": "cut',
        '["a list"]',
        '{"text": null}',
        r'{"text": "\ud800"}',
        '{"title": "t", "text": "last"}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    documents, bad = read(path)
    assert documents == [(0, "line\u2028break"), (6, "last")]
    assert bad.count == 4
    reasons = ["row 2: no valid JSON", "row 3: the line holds no JSON object"]
    reasons += ["row 4: no text under text or", "row 5: the text is not UTF-8"]
    for reason, named in zip(reasons, bad.kinds.values(), strict=True):
        assert reason in str(named)
    assert read(path, "title")[0] == [(6, "t")]


def test_a_plain_file_is_one_document_byte_for_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffa\r\nb\n\nç".encode())
    assert read(tmp_path / "a.txt")[0] == [(0, "\ufeffa\r\nb\n\nç")]
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    documents, bad = read(tmp_path / "b.txt")
    assert documents == []
    assert "b.txt: the text is not UTF-8" in str(bad)


def test_text_files_of_a_folder_are_found_by_split(tmp_path):
    for name in ("train-0.parquet", "train-1.jsonl", "train/x.txt", "val.txt", "train.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def names(split: corpus.Split) -> list[str]:
        return [p.name for p in corpus.sibling_split(str(tmp_path), split, "text")]

    assert names("train") == ["x.txt", "train-0.parquet", "train-1.jsonl"]
    assert names("validation") == ["val.txt"]
    assert names("test") == []
    assert len(corpus.files(f"{tmp_path}/*.jsonl", "data.train", "train", None, "text")) == 1
    with pytest.raises(DataError, match=r"data\.train: .* matches no \.parquet or \.jsonl or"):
        corpus.files(f"{tmp_path}/*.csv", "data.train", "train", None, "text")


def test_python_sources_are_dealt_by_name_into_two_splits():
    train = corpus.files(corpus.PYTHON_SOURCE, "data.train", "train", None, "text")
    validation = corpus.sibling_split(corpus.PYTHON_SOURCE, "validation", "text")
    assert len(train) > 300
    assert 0.02 < len(validation) / len(train) < 0.1
    assert not set(train) & set(validation)
    root = Path(sysconfig.get_path("stdlib"))
    names = {p.relative_to(root).as_posix() for p in train + validation}
    assert {"json/__init__.py", "ast.py"} <= names
    for folder in ("site-packages/", "test/", "tests/", "__pycache__/", "idle_test/"):
        assert not [name for name in names if f"/{folder}" in f"/{name}"]
    assert corpus.sibling_split(corpus.PYTHON_SOURCE, "test", "text") == []
    with pytest.raises(DataError, match="no test files, only train, validation"):
        corpus.files(corpus.PYTHON_SOURCE, "data.test", "test", None, "text")


def test_an_embedded_corpus_of_another_task_is_refused_by_name():
    with pytest.raises(DataError, match="no embedded corpus 'python-source'; there are: spoken"):
        corpus.check("speech-ctc", corpus.PYTHON_SOURCE, None, None)
    with pytest.raises(DataError, match="'python-sauce'; nearest is embedded:python-source"):
        corpus.check("causal-lm", "embedded:python-sauce", None, None)
    with pytest.raises(DataError, match=r"data\.test: nowhere does not exist"):
        corpus.check("causal-lm", corpus.PYTHON_SOURCE, None, "nowhere")
    corpus.check("image-classification", corpus.DIGITS, None, None)
