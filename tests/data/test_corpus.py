"""Which files a recipe means."""

from pathlib import Path

import pytest

from muster.data import corpus
from muster.errors import DataError


@pytest.fixture
def folder(tmp_path):
    """`make("a.parquet", "test/0.parquet")` is a folder with those (empty) files."""

    def make(*names: str) -> str:
        for name in names:
            path = tmp_path / "speech" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return str(tmp_path / "speech")

    return make


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_a_folder_gives_the_files_of_the_split_in_order(folder):
    spec = folder("train-1.parquet", "train-0.parquet", "test.parquet", "dev/0.parquet", "x.txt")
    assert names(corpus.files(spec, "data.train", "train")) == [
        "train-0.parquet",
        "train-1.parquet",
    ]
    assert names(corpus.files(spec, "data.train", "train", max_files=1)) == ["train-0.parquet"]
    assert names(corpus.files(spec, "data.validation", "validation")) == ["0.parquet"]
    assert names(corpus.sibling_split(spec, "test")) == ["test.parquet"]


def test_files_without_a_split_serve_the_split_that_is_asked_for(folder):
    spec = folder("a.parquet", "b.parquet")
    assert names(corpus.files(spec, "data.train", "train")) == ["a.parquet", "b.parquet"]
    assert corpus.sibling_split(spec, "validation") == []
    spec = folder("train.parquet")
    assert names(corpus.files(spec, "data.train", "train")) == ["train.parquet"]


def test_the_name_of_the_corpus_itself_makes_no_split(tmp_path):
    (tmp_path / "test-data").mkdir()
    (tmp_path / "test-data" / "0.parquet").touch()
    assert len(corpus.files(str(tmp_path / "test-data"), "data.train", "train")) == 1


def test_hidden_folders_are_not_searched(folder):
    spec = folder("train.parquet", ".cache/train-9.parquet", "sub/.tmp/train.parquet")
    assert len(corpus.files(spec, "data.train", "train")) == 1


def test_files_and_globs_mean_what_they_match_whatever_they_are_called(folder):
    spec = folder("train-0.parquet", "test-0.parquet", "deep/test-1.parquet", "test-2.csv")
    assert names(corpus.files(f"{spec}/test-0.parquet", "data.train", "train")) == [
        "test-0.parquet"
    ]
    assert names(corpus.files(f"{spec}/test*", "data.train", "train")) == ["test-0.parquet"]
    assert names(corpus.files(f"{spec}/**/test-*", "data.train", "train")) == [
        "test-1.parquet",
        "test-0.parquet",
    ]
    assert corpus.sibling_split(f"{spec}/*.parquet", "test") == []


def test_a_tilde_is_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(Path(folder("train.parquet")).parent))
    assert len(corpus.files("~/speech", "data.train", "train")) == 1
    assert len(corpus.files("~/speech/*.parquet", "data.train", "train")) == 1


def test_the_embedded_corpus_has_all_three_splits():
    spec = "embedded:spoken-numbers"
    assert len(corpus.files(spec, "data.train", "train")) == 6
    assert names(corpus.sibling_split(spec, "validation")) == ["validation.parquet"]
    assert names(corpus.sibling_split(spec, "test")) == ["test.parquet"]
    assert len(corpus.files(spec, "data.train", "train", max_files=2)) == 2


def test_an_unknown_embedded_corpus_names_the_nearest():
    with pytest.raises(DataError, match=r"'spoken-number'; nearest is embedded:spoken-numbers"):
        corpus.files("embedded:spoken-number", "data.train", "train")
    with pytest.raises(DataError, match="no embedded corpus 'xyz'; there are: spoken-numbers"):
        corpus.files("embedded:xyz", "data.train", "train")
    with pytest.raises(DataError, match="no embedded corpus"):
        corpus.files("embedded:..", "data.train", "train")


def test_an_empty_folder_says_how_to_fill_it(folder):
    spec = folder("readme.txt")
    with pytest.raises(
        DataError, match=r"data\.test: no \.parquet or metadata\.csv .* in the folder .*data make"
    ):
        corpus.files(spec, "data.test", "test")


def test_what_does_not_exist_names_the_key(tmp_path):
    with pytest.raises(DataError, match=r"data\.train: .*/gone does not exist"):
        corpus.files(f"{tmp_path}/gone", "data.train", "train")
    with pytest.raises(DataError, match=r"data\.train: .*matches no \.parquet or"):
        corpus.files(f"{tmp_path}/*.parquet", "data.train", "train")


def test_a_folder_without_the_split_says_which_it_has(folder):
    spec = folder("test.parquet", "dev.parquet")
    with pytest.raises(DataError, match="has no train files, only test, validation; name a file"):
        corpus.files(spec, "data.train", "train")
