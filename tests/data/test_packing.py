"""Every token predicted once, every byte counted once, tokenized once."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest

from lm_tokenizers import byte_level, word_level, write
from muster.data.cache import cache_folder
from muster.data.text import packing
from muster.data.text.packing import PackedSource
from muster.data.text.tokenizers import Bytes, HuggingFace, Tokenizer
from muster.errors import DataError

TEXTS = ["hello world", "naïve 漢字", "x", "hello " * 40, "😀"]


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def corpus(tmp_path) -> list[Path]:
    """Three files; an empty document among the rows."""
    rows = [TEXTS[0], TEXTS[1], "", TEXTS[2]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in rows))
    (tmp_path / "b.txt").write_text(TEXTS[3])
    (tmp_path / "c.txt").write_text(TEXTS[4])
    return [tmp_path / name for name in ("a.jsonl", "b.txt", "c.txt")]


def make(kind: str, tmp_path: Path) -> Tokenizer:
    if kind == "bytes":
        return Bytes()
    made = {"byte-level": byte_level, "words": word_level}[kind]()
    return HuggingFace.read(write(made, tmp_path / kind), "k")


@pytest.mark.parametrize("kind", ["bytes", "byte-level", "words"])
@pytest.mark.parametrize("length", [2, 7, 64, 1000])
def test_every_token_is_predicted_once_and_every_byte_counted_once(corpus, tmp_path, kind, length):
    tokenizer = make(kind, tmp_path)
    source = PackedSource(corpus, tokenizer, length, whole=False)
    samples = [source.load(i) for i in range(len(source))]
    expected = [t for text in TEXTS for t in [*tokenizer.encode(text), tokenizer.end]]
    assert [t for s in samples for t in s.tokens[1:].tolist()] == expected
    assert samples[0].tokens[0] == tokenizer.end
    for one, other in itertools.pairwise(samples):
        assert one.tokens[-1] == other.tokens[0]
    assert sum(s.bytes for s in samples) == sum(len(text.encode()) for text in TEXTS)
    assert source.lengths.tolist() == [length] * len(samples)


def test_training_leaves_the_short_end_out(corpus):
    total = sum(len(t.encode()) + 1 for t in TEXTS)
    assert total % 7
    source = PackedSource(corpus, Bytes(), 7, whole=True)
    assert len(source) == total // 7
    assert {len(source.load(i).tokens) for i in range(len(source))} == {8}


def test_the_bytes_of_a_sequence_are_those_of_its_targets(corpus):
    source = PackedSource(corpus, Bytes(), 7, whole=False)
    for i in range(len(source)):
        sample = source.load(i)
        assert sample.bytes == int((sample.tokens[1:] != 256).sum())


def test_a_token_that_stands_for_much_text_keeps_its_bytes(tmp_path):
    (tmp_path / "a.txt").write_text("hello " + "z" * 1000 + " hello " + "y" * 300)
    source = PackedSource([tmp_path / "a.txt"], make("words", tmp_path), 2, whole=False)
    assert [source.load(i).bytes for i in range(len(source))] == [5 + 1001, 6 + 301, 0]


def test_a_document_without_a_token_leaves_its_bytes_to_its_end(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "hello"}\n{"text": "   "}\n{"text": "world"}\n')
    source = PackedSource([tmp_path / "a.jsonl"], make("words", tmp_path), 10, whole=False)
    assert source.load(0).tokens.tolist() == [0, 2, 0, 0, 3, 0]
    assert source.load(0).bytes == 5 + 3 + 5


def test_documents_and_positions_restart_at_each_document(corpus):
    source = PackedSource(corpus, Bytes(), 12, whole=False)
    first = source.load(0)  # end h e l l o _ w o r l d | end
    assert first.documents.tolist() == [0] * 12
    assert first.positions.tolist() == list(range(12))
    second = source.load(1)  # end n a ï(2) v e _ 漢(3) 字(3 …
    assert second.tokens[0] == 256
    assert second.documents.tolist() == [0] * 12
    everything = PackedSource(corpus, Bytes(), 32, whole=False).load(0)
    lengths = [1 + len(TEXTS[0]), 1 + len(TEXTS[1].encode()), 2]
    expected = [p for n in lengths for p in range(n)]
    assert everything.positions.tolist()[: len(expected)] == expected
    assert everything.documents.tolist() == np.repeat([0, 1, 2, 3], [*lengths, 4]).tolist()
    within = PackedSource(corpus, Bytes(), 5, whole=False).load(1)  # begins inside the first
    assert within.positions.tolist() == [0, 1, 2, 3, 4]


def test_a_sequence_is_named_after_the_document_it_begins_in(corpus):
    places = ["a.jsonl row 0", "a.jsonl row 1", "a.jsonl row 3", "b.txt", "c.txt"]
    owners = [
        place
        for place, text in zip(places, TEXTS, strict=True)
        for _ in range(len(text.encode()) + 1)
    ]
    source = PackedSource(corpus, Bytes(), 3, whole=False)
    assert len({source.name(i) for i in range(len(source))}) == len(source)
    for i in range(len(source)):
        assert source.name(i).endswith(f"/{owners[3 * i]}")


def test_tokenizing_happens_once(corpus, monkeypatch):
    PackedSource(corpus, Bytes(), 7, whole=True)
    with monkeypatch.context() as patched:
        patched.setattr(packing, "_make", lambda *_: pytest.fail("tokenized again"))
        PackedSource(corpus, Bytes(), 9, whole=False)
    folders = list((cache_folder() / "tokens").iterdir())
    assert len(folders) == 1
    tokens = np.load(folders[0] / "tokens.npy", mmap_mode="r")
    assert tokens.dtype == np.uint16
    assert isinstance(tokens, np.memmap)


@pytest.mark.parametrize("change", ["content", "tokenizer", "column"])
def test_what_changes_the_tokens_tokenizes_again(corpus, tmp_path, change):
    before = PackedSource(corpus, Bytes(), 7, whole=True)
    tokenizer: Tokenizer = Bytes()
    column = None
    if change == "content":
        corpus[1].write_text("another text")
        os.utime(corpus[1], ns=(1, 1))
    if change == "tokenizer":
        tokenizer = make("byte-level", tmp_path)
    if change == "column":
        column = "text"
    PackedSource(corpus, tokenizer, 7, whole=True, text_column=column)
    assert len(list((cache_folder() / "tokens").iterdir())) == 2
    assert before.load(0).tokens[0] == 256


def test_a_damaged_cache_is_made_again_and_a_failed_one_leaves_nothing(corpus, tmp_path):
    source = PackedSource(corpus, Bytes(), 7, whole=True)
    expected = source.load(3).tokens.tolist()
    (folder,) = (cache_folder() / "tokens").iterdir()
    (folder / "stream.json").write_text("{")
    assert PackedSource(corpus, Bytes(), 7, whole=True).load(3).tokens.tolist() == expected
    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"d\.parquet"):
        PackedSource([corpus[0], tmp_path / "d.parquet"], Bytes(), 7, whole=True)
    assert list((cache_folder() / "tokens").iterdir()) == [folder]


def test_many_ids_take_wider_tokens(corpus, monkeypatch):
    monkeypatch.setattr(Bytes, "size", 2**16 + 1)
    assert PackedSource(corpus, Bytes(), 7, whole=True).stream.tokens.dtype == np.uint32


def test_bad_rows_are_judged_also_from_the_cache(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": null}\n' * 3)
    for _ in range(2):
        with pytest.raises(
            DataError, match=r"3 of 6 documents .*3 × no text under .*a\.jsonl row 1, row 3"
        ):
            PackedSource([tmp_path / "a.jsonl"], Bytes(), 4, whole=True)
    assert len(PackedSource([tmp_path / "a.jsonl"], Bytes(), 4, whole=True, max_bad_fraction=0.5))


def test_too_little_text_says_so(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(DataError, match=r"makes 4 tokens, .*data\.sequence_length=8"):
        PackedSource([tmp_path / "a.txt"], Bytes(), 8, whole=True)
    (tmp_path / "b.txt").write_text("")
    with pytest.raises(DataError, match=r"makes 0 tokens"):
        PackedSource([tmp_path / "b.txt"], Bytes(), 8, whole=False)


def test_a_cache_without_room_says_what_to_do(corpus, small_disk, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(small_disk))
    corpus[1].write_text("z" * (1 << 20))
    with pytest.raises(DataError, match=r"cannot write tokens to .*XDG_CACHE_HOME"):
        PackedSource(corpus, Bytes(), 7, whole=True)
    assert list((small_disk / "muster" / "tokens").iterdir()) == []


@pytest.mark.guides
def test_memory_stays_bounded_while_a_large_corpus_is_tokenized(tmp_path):
    import tracemalloc

    line = json.dumps({"text": "spoken words " * 80}) + "\n"
    (tmp_path / "big.jsonl").write_text(line * 10_000)  # 10 MB of text
    tracemalloc.start()
    source = PackedSource([tmp_path / "big.jsonl"], Bytes(), 256, whole=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(source) * 256 > 10e6
    assert peak < 28 << 20, f"{peak / 2**20:.0f} MiB for one group of a mebibyte"
