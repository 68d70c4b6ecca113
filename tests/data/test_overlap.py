"""Samples of a split that are in the training data too are found, and nothing else is."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clips import encode, tone, write_parquet
from PIL import Image

from muster.data import overlap as module
from muster.data.images.files import ParquetImages
from muster.data.images.source import ImageSource
from muster.data.overlap import Documents, Overlap, find_overlap, text_overlap, unseen
from muster.data.sources import ListSource
from muster.data.speech import overlap as speech_overlap
from muster.data.speech.source import SpeechLimits, SpeechSource
from muster.data.text.packing import PackedSource
from muster.data.text.tokenizers import Bytes


def documents(*texts: list[int]) -> Documents:
    return Documents(
        np.concatenate([np.array(text, np.uint16) for text in texts]),
        np.cumsum([0, *map(len, texts)]),
    )


def by_hand(mine: Documents, theirs: Documents, size: int) -> tuple[int, int]:
    """The same, by comparing lists."""

    def split(found: Documents) -> list[tuple[int, ...]]:
        spans = zip(found.bounds[:-1], found.bounds[1:], strict=True)
        return [tuple(found.tokens[a:b].tolist()) for a, b in spans]

    stream, whole = theirs.tokens.tolist(), set(split(theirs))
    occurring = {tuple(stream[i : i + size]) for i in range(len(stream) - size + 1)}
    seen = total = 0
    for text in split(mine):
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        wanted = [*parts[:-1], text[-size:]]  # the last ends with the text
        known = occurring if len(text) >= size else whole
        seen += sum(len(part) for part, piece in zip(parts, wanted, strict=True) if piece in known)
        total += len(text)
    return seen, total


@pytest.mark.parametrize("chunk", [64, 1 << 20])
def test_text_is_found_as_by_comparing_every_piece_with_every_place(monkeypatch, chunk):
    monkeypatch.setattr(module, "CHUNK", chunk)
    rng = np.random.default_rng(0)
    train = [rng.integers(0, 5, n).tolist() for n in (500, 3, 90, 31, 700)]
    test = [
        train[0][100:250],
        rng.integers(0, 5, 200).tolist(),
        train[1],
        train[3][:-1],
        [*rng.integers(0, 5, 40).tolist(), *train[4][333:433]],
        train[3],
    ]
    mine, theirs = documents(*test), documents(*train)
    found = text_overlap(mine, theirs, bytes_per_token=200 / 40)
    assert (found.seen, found.total) == by_hand(mine, theirs, 40)
    assert 0 < found.seen < found.total
    itself = text_overlap(theirs, theirs, bytes_per_token=200 / 40)
    assert itself.seen == itself.total == len(theirs.tokens)


def test_the_end_of_a_document_is_compared_too():
    """90 tokens in pieces of 40: only the last, which adds 10 to those before it, is in the training text."""
    rng = np.random.default_rng(0)
    train = rng.integers(0, 500, 300).tolist()
    test = [*rng.integers(0, 500, 45).tolist(), *train[100:145]]
    found = text_overlap(documents(test), documents(train), bytes_per_token=5)
    assert (found.seen, found.total) == (10, 90)


def test_more_training_text_than_is_compared_is_told(monkeypatch):
    monkeypatch.setattr(module, "MOST_TOKENS", 100)
    mine = documents(list(range(50)))
    theirs = documents(list(range(200, 280)), list(range(50)))
    found = text_overlap(mine, theirs, bytes_per_token=1)
    assert found.seen == 0
    assert found.unchecked == "compared with the first 80 training tokens only"
    assert not unseen([found])


def test_text_of_files_is_compared_once(tmp_path, monkeypatch):
    line = "a sentence that stands in both of the files, and is longer than nothing. " * 4
    (tmp_path / "train.txt").write_text("x" * 300 + line)
    (tmp_path / "test.txt").write_text(line + "y" * 256)
    options = {"length": 16, "whole": False}
    train, test = (
        PackedSource([tmp_path / f"{n}.txt"], Bytes(), **options) for n in ("train", "test")
    )
    (found,) = find_overlap(test, train)
    assert (found.seen, found.total) == (200, 549)
    assert found.words("test").startswith("warning: test: 36.4% (200 of 549 tokens) are in text")
    with monkeypatch.context() as without:
        without.setattr("muster.data.text.packing.text_overlap", None)
        assert find_overlap(test, train) == [found]
    monkeypatch.setattr(module, "PIECE_BYTES", 140)
    assert find_overlap(test, train)[0].seen == 280, "an answer of another piece size"


@pytest.fixture
def clips(tmp_path):
    """Training and test clips: one sound in both as FLAC and as WAV, one of equal length, one sentence
    said twice."""
    same, other = ((tone(0.5, hertz) * 30000).astype(np.int16) for hertz in (300, 310))
    write_parquet(tmp_path / "train.parquet", [encode(same), encode(tone(0.7))], ["A b.", "c"])
    test = [encode(other), encode(same, container="FLAC"), encode(tone(0.9)), encode(tone(0.7))]
    write_parquet(tmp_path / "test.parquet", test, ["x", "a B", "C", "d"])
    return [SpeechSource([tmp_path / f"{n}.parquet"], SpeechLimits()) for n in ("train", "test")]


def test_clips_with_the_same_sound_are_found_in_any_lossless_form(clips):
    train, test = clips
    audio, text = find_overlap(test, train)
    assert (audio.seen, audio.total) == (2, 4)
    assert sorted(audio.first) == [
        "test.parquet row 1 is train.parquet row 0",
        "test.parquet row 3 is train.parquet row 1",
    ]
    assert text.seen == 2
    assert not unseen([audio, text])
    assert not test.broken
    assert not train._loaded.any(), "comparing is not training"


def test_sentences_that_are_said_twice_are_told_and_still_unseen(clips):
    audio, text = find_overlap(*clips[::-1])
    assert unseen([Overlap("audio", 0, audio.total, "clips"), text])
    assert text.words("test") == (
        "test: 50.0% (2 of 4 clips) share their text with the training data"
    )


def test_of_too_many_clips_those_of_equal_text_are_compared(clips, monkeypatch):
    monkeypatch.setattr(speech_overlap, "MOST_SECONDS", 1.5)
    audio, _ = find_overlap(*clips[::-1])
    assert audio.seen == 1
    assert "only clips of equal text were compared" in audio.unchecked
    assert not unseen([Overlap("audio", 0, 3, "clips", unchecked=audio.unchecked)])
    monkeypatch.setattr(speech_overlap, "MOST_SECONDS", 0.5)
    audio, _ = find_overlap(*clips[::-1])
    assert audio.words("test") == (
        "test: audio not compared with the training data: too many have the same duration and the same text"
    )
    assert not unseen([audio])


def test_images_with_the_same_pixels_are_found(tmp_path):
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)) for _ in range(4)]

    def encoded(image: Image.Image, form: str) -> bytes:
        file = io.BytesIO()
        image.save(file, form)
        return file.getvalue()

    def source(name: str, cells: list[bytes]) -> ImageSource:
        column = pa.array([{"bytes": cell} for cell in cells])
        labels = [i % 2 for i in range(len(cells))]
        pq.write_table(pa.table({"image": column, "label": labels}), tmp_path / name)
        return ImageSource(ParquetImages([tmp_path / name]), [0, 1], 3, 8)

    train = source(
        "train.parquet", [encoded(p, "PNG") for p in pictures[:2]] + [encoded(pictures[3], "JPEG")]
    )
    test = source(
        "test.parquet",
        [encoded(pictures[2], "PNG"), encoded(pictures[1], "BMP"), encoded(pictures[3], "JPEG")],
    )
    (found,) = find_overlap(test, train)
    assert (found.seen, found.total) == (2, 3)
    assert found.first[0] == "test.parquet row 1 is train.parquet row 1"


def test_what_cannot_be_compared_is_not_called_unseen():
    found = find_overlap(ListSource([1]), ListSource([2]))
    assert not unseen(found)
    assert not unseen([])
    assert "test: samples not compared with the training data" in found[0].words("test")
    assert unseen([Overlap("audio", 0, 3, "clips")])
