"""Which split a file belongs to, and that none is dropped in silence."""

from pathlib import Path

import pytest

from muster.data import corpus, splits
from muster.data.splits import Claim
from muster.errors import DataError


@pytest.fixture
def folder(tmp_path):
    """`make(a=3, training=1)` is a folder with `a.txt` of three bytes and `training.txt` of one."""

    def make(sizes: dict[str, int]) -> str:
        for name, size in sizes.items():
            path = tmp_path / "corpus" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x" * size)
        return str(tmp_path / "corpus")

    return make


def files(spec: str, split: splits.Split) -> list[str]:
    return [path.name for path in corpus.split_files(spec, None, None, split, content="text")]


@pytest.mark.parametrize(
    ("path", "split", "plain"),
    [
        ("train-00000-of-00005.parquet", "train", True),
        ("train-00000-of-00005-a09b74b3ef9c3b56.parquet", "train", True),
        ("validation_1.parquet", "validation", True),
        ("valid.parquet", "validation", True),
        ("val-0.parquet", "validation", True),
        ("TEST.parquet", "test", True),
        ("t10k-images-idx3-ubyte.gz", "test", True),
        ("default/test/0000.parquet", "test", True),
        ("train/english/0000.parquet", "train", True),
        ("train/test-0.parquet", "test", True),
        ("train/test/0.parquet", "test", True),
        ("train/test-driven.txt", "train", True),
        ("training.parquet", "train", False),
        ("dev.clean.parquet", "validation", False),
        ("dev-clean/0000.parquet", "validation", False),
        ("wiki.test.tokens", "test", False),
        ("train-test.txt", None, None),
        ("trains.parquet", None, None),
        ("0000.parquet", None, None),
        ("latest/0000.parquet", None, None),
    ],
)
def test_a_name_claims_a_split_plainly_or_only_resembles_one(path, split, plain):
    assert splits.claim(Path(path)) == (split and Claim(split, plain))


def test_one_similar_name_among_many_others_drops_none_of_them(folder):
    """A folder of texts, one of which happens to be called training.txt."""
    spec = folder({f"text-{n:02d}.txt": 1 for n in range(16)} | {"training.txt": 1})
    assert len(files(spec, "train")) == 17
    _, assigned = corpus.find(spec, "data.train", "text")
    assert [path.name for path in assigned.not_counted] == ["training.txt"]
    assert not assigned.unclaimed


def test_a_similar_name_is_no_test_data_among_files_that_name_no_split(folder):
    spec = folder({"a.txt": 1, "b.txt": 1, "test-driven.txt": 1})
    assert len(files(spec, "train")) == 3
    assert files(spec, "test") == []


@pytest.mark.parametrize(
    "names",
    [
        {"wiki.train.txt": "train", "wiki.valid.txt": "validation", "wiki.test.txt": "test"},
        {"training.txt": "train", "validation.txt": "validation"},
        {"dev-clean/0.txt": "validation", "train-clean-100/0.txt": "train"},
        {"training/a.txt": "train", "training/b.txt": "train", "test.txt": "test"},
    ],
)
def test_similar_names_count_where_their_neighbours_agree(folder, names):
    spec = folder(dict.fromkeys(names, 1))
    for split in splits.SPLITS:
        expected = sorted(Path(name).name for name, of in names.items() if of == split)
        assert sorted(files(spec, split)) == expected


@pytest.mark.parametrize("marked", [("my-train", "my-test"), ("wiki.train", "wiki.valid")])
def test_similar_names_of_two_splits_count_beside_as_many_that_name_none(folder, marked):
    train, scored = (f"{name}.txt" for name in marked)
    spec = folder({train: 9, scored: 1, "a.txt": 1, "b.txt": 1, "c.txt": 1})
    assert files(spec, "train") == [train]
    assert files(spec, "test") + files(spec, "validation") == [scored]
    _, assigned = corpus.find(spec, "data.train", "text")
    assert len(assigned.unclaimed) == 3
    assert not assigned.not_counted


def test_files_of_no_split_that_hold_more_than_the_training_files_are_refused(folder):
    spec = folder({"train.txt": 10, "a.txt": 6, "b.txt": 5, "test.txt": 99})
    with pytest.raises(
        DataError,
        match=r"data\.train: .* 1 file\(s\) named as training data \(train\.txt\) "
        r"and 2 that belong to no split and hold more \(a\.txt, b\.txt\); if they are",
    ):
        files(spec, "train")


def test_files_of_no_split_that_hold_less_are_left_out_and_known(folder):
    spec = folder({"train.txt": 10, "README.txt": 10})
    assert files(spec, "train") == ["train.txt"]
    _, assigned = corpus.find(spec, "data.train", "text")
    assert [path.name for path in assigned.unclaimed] == ["README.txt"]


def test_files_without_a_split_are_training_data_beside_plain_test_data(folder):
    spec = folder({"a.txt": 1, "b.txt": 1, "test.txt": 1})
    assert files(spec, "train") == ["a.txt", "b.txt"]
    assert files(spec, "test") == ["test.txt"]
