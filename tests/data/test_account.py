"""What a run says of its data before the first step: what is read, and what is not, file by file."""

from pathlib import Path

import pytest
from clips import encode, tone, write_parquet

from muster.data.account import Account, make_account
from muster.data.corpus import split_files
from muster.data.speech.source import SpeechLimits, SpeechSource
from muster.data.splits import Split
from muster.data.text.packing import PackedSource
from muster.data.text.tokenizers import Bytes


def of_text(folder: Path, max_files: int | None = None, length: int = 8, **named: str) -> Account:
    specs: dict[Split, str | None] = {"train": str(folder), "validation": None, "test": None}
    specs |= {split: str(path) for split, path in named.items()}  # type: ignore[misc]

    def source(split: Split) -> PackedSource | None:
        paths = split_files(*specs.values(), split, max_files, "text")  # type: ignore[arg-type]
        whole = split == "train"
        options = {"whole": whole, "max_bad_fraction": 0.9}
        return PackedSource(paths, Bytes(), length, **options) if paths else None

    return make_account(source, specs, "text", max_files)


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def reasons(account: Account) -> dict[str, str]:
    return {found.file.name: found.why for found in account.not_read}


def test_every_file_and_token_of_a_folder_is_accounted_for(tmp_path):
    texts = {f"text{n}_txt": "x" * (10 + n) for n in range(16)} | {"training_txt": "y" * 5}
    account = of_text(write(tmp_path, **texts))
    (train,) = account.splits
    tokens = sum(len(text) + 1 for text in texts.values())
    assert train.amounts == {"documents": 17, "tokens": tokens}
    assert {Path(f.file).name: f.amounts["tokens"] for f in train.files} == {
        name.replace("_", "."): len(text) + 1 for name, text in texts.items()
    }
    assert train.samples == tokens // 8
    assert train.left_out == {"tokens at the end that do not fill a sequence": tokens % 8}
    lines = account.lines()
    assert lines[0] == f"train: {tokens // 8} samples, 17 documents, {tokens} tokens in 17 file(s)"
    assert "validation: none" in lines
    assert any(line.startswith("training.txt: no split by the name alone") for line in lines)
    assert not account.warnings()


def test_a_file_that_may_be_test_data_is_trained_on_with_a_warning(tmp_path):
    account = of_text(write(tmp_path, a_txt="x" * 20, b_txt="y" * 20, **{"my-test_txt": "z"}))
    assert (
        "warning: my-test.txt: no split by the name alone, since the files beside it name none; "
        "taken like them; test data belong into a folder test/"
    ) in account.lines()


def test_rows_that_are_left_out_are_counted_by_file_and_reason(tmp_path):
    good = '{"text": "a line that is long enough"}\n'
    write(
        tmp_path,
        a_jsonl=good + '{"text": null}\n{"other": 1}\n' + '{"text": ""}\n' + good,
        b_jsonl=good + "not json\n",
    )
    account = of_text(tmp_path)
    (train,) = account.splits
    a, b = train.files
    assert (a.count, a.unit, b.count) == (2, "documents", 1)
    assert list(a.left_out.values()) == [2, 1]
    assert a.left_out["empty"] == 1
    assert list(b.left_out.values()) == [1]
    assert "no valid JSON" in next(iter(b.left_out))
    assert any("left out 2: no text under" in x and "(a.jsonl)" in x for x in account.lines())
    assert account.to_json()["splits"]["train"]["by_file"][1]["left_out"] == b.left_out


def test_every_file_that_no_split_uses_is_named_with_its_reason(tmp_path):
    text = "a text that is long enough to make more than one sequence"
    folder = write(tmp_path / "c", train_txt=text, NOTES_txt="short", README_md="x", test_txt=text)
    other = write(tmp_path / "other", held_txt=text) / "held.txt"
    account = of_text(folder, test=str(other))
    found = reasons(account)
    assert set(found) == {"NOTES.txt", "README.md", "test.txt"}
    assert found["NOTES.txt"].startswith("claimed by no split")
    assert found["README.md"].startswith("of a kind that is not read")
    assert found["test.txt"] == f"named as test data, for which data.test names {other}"
    assert len(account.warnings()) == 3
    assert [part.split for part in account.splits] == ["train", "test"]


def test_files_beyond_the_limit_are_named(tmp_path):
    text = "a text that is long enough"
    account = of_text(write(tmp_path, a_txt=text, b_txt=text, c_txt=text), max_files=1)
    assert set(reasons(account)) == {"b.txt", "c.txt"}
    assert "warning: 2 file(s) are not used, beyond data.max_parquet_files=1: b.txt, c.txt" in (
        account.lines()
    )


@pytest.fixture
def speech(tmp_path):
    clips = [encode(tone(span)) for span in (0.5, 0.02, 0.7)]
    write_parquet(tmp_path / "p" / "train-0.parquet", clips, ["a", "b", ""])
    write_parquet(tmp_path / "p" / "train-1.parquet", clips[:1] * 3, list("abc"))
    return tmp_path / "p"


def of_speech(folder: Path) -> Account:
    specs: dict[Split, str | None] = {"train": str(folder), "validation": None, "test": None}

    def source(split: Split) -> SpeechSource | None:
        paths = split_files(str(folder), None, None, split)
        return SpeechSource(paths, SpeechLimits()) if paths else None

    return make_account(source, specs, "speech")


def test_clips_are_accounted_for_in_hours_by_file(speech):
    (train,) = of_speech(speech).splits
    assert [file.count for file in train.files] == [1, 3]
    assert [file.amounts["hours"] * 3600 for file in train.files] == pytest.approx([0.5, 1.5])
    assert train.files[0].left_out == {"shorter than 0.1 s": 1, "without text": 1}
    assert train.left_out == {"shorter than 0.1 s": 1, "without text": 1}


def test_audio_that_no_metadata_names_is_told(tmp_path):
    for name in ("a.wav", "b.wav"):
        (tmp_path / name).write_bytes(encode(tone(0.5)))
    (tmp_path / "metadata.csv").write_text("file_name,text\na.wav,one two\n")
    account = of_speech(tmp_path)
    assert reasons(account) == {"b.wav": "which no row of their metadata names"}
