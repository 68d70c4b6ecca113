"""Clips fit to train on: what is left out is counted, what is wrong is named."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from clips import AUDIO, encode, tone, write_parquet

from muster.data import audio
from muster.data.speech import SpeechLimits, SpeechSource, check_characters
from muster.data.text import Characters
from muster.errors import DataError

GOOD = encode(tone(0.5))


@pytest.fixture
def source(tmp_path):
    """`source([clip, …], ["text", …], **limits)` reads them from train.parquet."""

    def make(clips, texts=None, **limits) -> SpeechSource:
        texts = texts or ["a"] * len(clips)
        path = write_parquet(tmp_path / "train.parquet", clips, texts, AUDIO)
        return SpeechSource([path], SpeechLimits(**limits))

    return make


@pytest.fixture
def decoded(monkeypatch):
    """Every clip decoded from here on."""
    seen = []
    decode = audio.decode
    monkeypatch.setattr(audio, "decode", lambda clip, rate: seen.append(clip) or decode(clip, rate))
    return seen


def test_samples_come_decoded_normalised_and_at_the_wanted_rate(source):
    clips = [encode(tone(0.5, 300, 8000), 8000), encode(tone(0.25))]
    made = source(clips, ["  It’s  FINE ", "b"])
    assert len(made) == 2
    assert made.lengths == pytest.approx([0.5, 0.25])
    sample = made.load(0)
    assert (sample.id, sample.text) == (0, "it's fine")
    assert sample.samples.dtype == np.float32
    assert len(sample.samples) == 8000
    assert np.abs(sample.samples - tone(0.5, 300))[100:-100].max() < 1e-3
    assert made.name(1) == "train.parquet row 1"


def test_case_stays_where_it_is_wanted(source):
    assert source([GOOD], ["Hello"], lowercase=False).load(0).text == "Hello"


def test_clips_too_short_too_long_or_without_text_are_left_out_and_counted(source):
    clips = [GOOD, encode(tone(0.05)), encode(tone(2.0)), GOOD, GOOD, encode(tone(1.0))]
    made = source(clips, ["a", "b", "c", " \t", None, "f"], max_seconds=1.0)
    assert [row.number for row in made.rows] == [0, 5]
    assert made.left_out == {"shorter than 0.1 s": 1, "longer than 1.0 s": 1, "without text": 2}
    assert made.load(1).text == "f"
    assert made.name(1) == "train.parquet row 5"
    assert len(made.load(1).samples) == 16000


def test_a_bad_row_above_the_share_names_file_row_reason_and_key(source):
    with pytest.raises(DataError) as error:
        source([GOOD, b"garbage", encode(tone(0.0)), *[GOOD] * 7], max_bad_fraction=0.1)
    words = str(error.value)
    assert words.startswith("2 of 10 rows cannot be read")
    assert "train.parquet row 1: not readable as audio" in words
    assert "train.parquet row 2: the clip has zero length" in words
    assert "data.max_bad_fraction above 0.200" in words


def test_bad_rows_within_the_share_are_left_out_and_counted(source, caplog):
    made = source([GOOD, b"garbage", encode(tone(0.0)), *[GOOD] * 7], max_bad_fraction=0.2)
    assert len(made) == 8
    assert made.left_out == {"unreadable": 2}
    assert "train.parquet row 1: not readable as audio" in caplog.text
    assert [made.rows[i].number for i in (0, 1)] == [0, 3]


@pytest.mark.parametrize("share", [0.01, 1.0])
def test_nothing_but_bad_rows_is_an_error_at_any_share(source, share):
    with pytest.raises(DataError, match=r"train\.parquet") as error:
        source([b"garbage", b"", b"x"], max_bad_fraction=share)
    assert "above 1.000" not in str(error.value), "no cure that cannot be taken"


def test_many_bad_rows_are_named_in_part(source):
    with pytest.raises(DataError, match=r"9 of 9 .* row 4: .* …\)") as error:
        source([b"garbage"] * 9)
    assert "row 5" not in str(error.value)


def test_no_usable_clip_says_what_became_of_them(source):
    with pytest.raises(
        DataError, match=r"no usable clip among 2 rows of train\.parquet: 2 shorter"
    ):
        source([encode(tone(0.05))] * 2)


@pytest.mark.parametrize(
    ("container", "words"),
    [("FLAC", "not readable as audio"), ("MP3", r"header promises 1\.00 s, the clip holds 0\.")],
)
def test_a_clip_whose_body_is_cut_off_is_named_when_it_is_loaded(source, container, words):
    noise = np.random.default_rng(0).standard_normal(16000) * 0.1
    whole = encode(noise, container=container)
    made = source([GOOD, whole[: len(whole) // 2]])
    assert len(made) == 2, "its header is sound"
    with pytest.raises(DataError, match=rf"^train\.parquet row 1: .*{words}"):
        made.load(1)


def test_a_named_file_that_vanishes_is_named_when_it_is_loaded(tmp_path, source):
    (tmp_path / "x.wav").write_bytes(GOOD)
    made = source([{"bytes": None, "path": "x.wav"}])
    (tmp_path / "x.wav").unlink()
    with pytest.raises(DataError, match=r"^train\.parquet row 0: the audio file x\.wav does not"):
        made.load(0)


def test_text_outside_the_vocabulary_names_character_file_and_row(source):
    made = source([encode(tone(0.05)), GOOD, GOOD, GOOD], ["é", "abc", "naïve", "ïœ"])
    with pytest.raises(DataError) as error:
        check_characters(made, Characters(), drop=False)
    words = str(error.value)
    assert "'ï' (2×, first in train.parquet row 2)" in words
    assert "'œ' (1×, first in train.parquet row 3)" in words
    assert "data.unknown_characters=drop" in words
    assert "é" not in words, "a row that was left out does not matter"


def test_text_outside_the_vocabulary_may_be_dropped(source, caplog):
    made = source([GOOD], ["naïve"])
    check_characters(made, Characters(), drop=True)
    assert "'ï' (1×, first in train.parquet row 0)" in caplog.text


def test_decoded_clips_are_kept_within_the_budget(source, decoded):
    made = source([GOOD] * 5, cache_bytes=2 * 8000 * 4)
    for _ in range(2):
        for i in range(5):
            made.load(i)
    assert len(decoded) == 5 + 3, "two of five are kept"
    assert made._cached_bytes == sum(s.nbytes for s in made._cache.values()) == 64000


def test_without_a_budget_nothing_is_kept(source, decoded):
    made = source([GOOD], cache_bytes=0)
    made.load(0)
    made.load(0)
    assert len(decoded) == 2


def test_clips_can_be_left_out_later_and_the_rest_stays_in_step(source):
    clips = [encode(tone(0.2 + 0.1 * i)) for i in range(5)]
    made = source(clips, list("abcde"))
    for i in range(5):
        made.load(i)
    made.keep([True, False, True, False, True], "they do not fit")
    assert made.left_out == {"they do not fit": 2}
    assert made.lengths == pytest.approx([0.2, 0.4, 0.6])
    assert [made.load(i).text for i in range(3)] == ["a", "c", "e"]
    assert [len(made.load(i).samples) for i in range(3)] == [3200, 6400, 9600]
    assert made.name(2) == "train.parquet row 4"
    assert made._cached_bytes == sum(s.nbytes for s in made._cache.values()) == 19200 * 4


def test_leaving_out_every_clip_is_an_error_that_names_the_first(source):
    with pytest.raises(
        DataError, match=r"no clip is left: too much; first was train\.parquet row 0"
    ):
        source([GOOD, GOOD]).keep([False, False], "too much")


def test_many_threads_load_the_right_clips(source, monkeypatch):
    clips = [encode(tone(0.1 + 0.01 * i)) for i in range(24)]
    made = source(clips, [chr(97 + i) for i in range(24)], cache_bytes=100_000)
    wanted = np.random.default_rng(0).integers(0, 24, 600).tolist()
    with ThreadPoolExecutor(8) as pool:
        loaded = list(pool.map(made.load, wanted))
    for i, sample in zip(wanted, loaded, strict=True):
        assert sample.id == i
        assert sample.text == chr(97 + i)
        assert len(sample.samples) == 1600 + 160 * i
    assert made._cached_bytes == sum(s.nbytes for s in made._cache.values()) <= 100_000


def test_a_clip_two_threads_decode_at_once_is_counted_once(source, monkeypatch):
    made = source([GOOD])
    samples = made.load(0).samples
    made._cache.clear()
    made._cached_bytes = 0

    def slow(clip, rate):
        if not made._cache:  # the other thread comes first
            made._cache[0], made._cached_bytes = samples, samples.nbytes
        return samples

    monkeypatch.setattr(audio, "decode", slow)
    made.load(0)
    assert made._cached_bytes == samples.nbytes
