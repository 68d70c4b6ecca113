"""Clips fit to train on: what is left out is counted, what is wrong is named."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from clips import AUDIO, encode, tone, write_parquet

from muster.data.speech import audio
from muster.data.speech.source import SpeechLimits, SpeechSource, check_characters
from muster.data.speech.vocabulary import Characters
from muster.errors import DataError
from muster.recipe.data import Data

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
    monkeypatch.setattr(audio, "decode", lambda clip, *how: seen.append(clip) or decode(clip, *how))
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
    with pytest.raises(DataError, match=r"9 of 9 .* row 4 …\)") as error:
        source([b"garbage"] * 9)
    assert "row 5" not in str(error.value)


def test_no_usable_clip_says_what_became_of_them(source):
    with pytest.raises(
        DataError, match=r"no usable clip among 2 rows of train\.parquet: 2 shorter"
    ):
        source([encode(tone(0.05))] * 2)


@pytest.mark.parametrize(
    ("container", "words"),
    [("FLAC", "not readable as audio"), ("MP3", r"header says 1\.00 s, the clip has 0\.")],
)
def test_a_clip_whose_body_is_cut_off_is_silence_named_and_counted_once(
    source, container, words, caplog
):
    noise = np.random.default_rng(0).standard_normal(16000) * 0.1
    whole = encode(noise, container=container)
    made = source([GOOD, whole[: len(whole) // 2]], ["a", "b"], max_bad_fraction=0.5)
    plan = (len(made), made.lengths.tolist(), made.fingerprint())
    for _ in range(2):
        sample = made.load(1)
        assert (sample.id, sample.text, sample.broken) == (1, "b", True)
        assert np.array_equal(sample.samples, np.zeros(round(made.lengths[1] * 16000), np.float32))
        assert sample.samples.dtype == np.float32
    assert not made.load(0).broken
    assert made.left_out == {"broken while training": 1}
    (record,) = caplog.records
    assert re.search(rf"^train\.parquet row 1: .*{words}", record.getMessage())
    assert (len(made), made.lengths.tolist(), made.fingerprint()) == plan, "a run can be resumed"


def test_a_named_file_that_vanishes_is_silence_named(tmp_path, source, caplog):
    (tmp_path / "x.wav").write_bytes(GOOD)
    made = source([{"bytes": None, "path": "x.wav"}], max_bad_fraction=1.0)
    (tmp_path / "x.wav").unlink()
    assert made.load(0).broken
    assert "train.parquet row 0: the audio file x.wav does not exist" in caplog.text


def test_more_broken_clips_than_the_share_end_the_run_with_a_list(source):
    flac = encode(np.random.default_rng(0).standard_normal(16000) * 0.1, container="FLAC")
    made = source([*[GOOD] * 17, *[flac[: len(flac) // 2]] * 3], max_bad_fraction=0.1)
    assert [made.load(i).broken for i in (17, 18, 17, 18, 0)] == [True] * 4 + [False]
    with pytest.raises(DataError) as error:
        made.load(19)
    words = str(error.value)
    assert words.startswith("3 of 20 clips broke while training (3 × not readable as audio")
    assert "train.parquet row 17, row 18, row 19)" in words
    assert "data.max_bad_fraction above 0.150" in words
    assert "data inspect DATA --decode" in words


def test_clips_that_break_alike_are_told_a_few_times_and_then_counted(source, caplog):
    flac = encode(np.random.default_rng(0).standard_normal(1600) * 0.1, container="FLAC")
    made = source([flac[: len(flac) // 2]] * 15 + [GOOD], max_bad_fraction=1.0)
    assert all(made.load(i).broken for i in range(15))
    *each, summary = [record.getMessage() for record in caplog.records]
    assert len(each) == 5
    assert summary.startswith("10 clips are ignored in this run by now: 10 × not readable")
    assert made.left_out == {"broken while training": 15}


def test_a_rank_of_many_judges_by_the_clips_it_has_met(source):
    """Each of 64 ranks meets few of all clips: their share of the whole would stay small."""
    flac = encode(np.random.default_rng(0).standard_normal(1600) * 0.1, container="FLAC")
    made = source([*[flac[: len(flac) // 2]] * 11, *[GOOD] * 1600], max_bad_fraction=0.01)
    assert all(made.load(i).broken for i in range(10))
    with pytest.raises(DataError, match="11 of 1000 clips broke while training"):
        made.load(10)


def test_a_broken_clip_that_many_threads_load_at_once_is_counted_once(source, monkeypatch, caplog):
    made, together = source([GOOD], max_bad_fraction=1.0), threading.Barrier(4, timeout=60)

    def fail(clip, *how):
        together.wait()
        raise DataError("it broke")

    monkeypatch.setattr(audio, "decode", fail)
    with ThreadPoolExecutor(4) as pool:
        assert all(sample.broken for sample in pool.map(made.load, [0] * 4))
    assert made.left_out == {"broken while training": 1}
    assert len(caplog.records) == 1


def test_a_file_replaced_by_a_longer_one_during_training_is_no_crash(tmp_path, source, caplog):
    (tmp_path / "x.wav").write_bytes(GOOD)
    made = source([{"bytes": None, "path": "x.wav"}], max_bad_fraction=1.0)
    (tmp_path / "x.wav").write_bytes(encode(tone(2.0)))
    sample = made.load(0)
    assert (sample.broken, len(sample.samples)) == (True, 8000)
    assert "the header says 0.50 s, the clip has 2.00 s" in caplog.text


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

    def slow(clip, *how):
        if not made._cache:  # the other thread comes first
            made._cache[0], made._cached_bytes = samples, samples.nbytes
        return samples

    monkeypatch.setattr(audio, "decode", slow)
    made.load(0)
    assert made._cached_bytes == samples.nbytes


def test_long_clips_are_cut_and_counted_where_the_recipe_says_so(source, decoded, caplog):
    clips = [encode(tone(span, 300)) for span in (0.5, 1.0, 2.5)]
    made = source(clips, list("abc"), max_seconds=1.0, long_clips="cut")
    assert made.lengths == pytest.approx([0.5, 1.0, 1.0])
    assert made.left_out == {}
    assert made.cut == {"longer than 1.0 s": 1}
    assert "cut 1 of 3 clips at 1 s" in caplog.text
    samples = made.load(2).samples
    assert len(samples) == 16000
    assert np.abs(samples - tone(1.0, 300)).max() < 1e-4
    assert len(made.load(1).samples) == 16000


def test_a_long_clip_whose_beginning_is_missing_too_is_refused(source):
    noise = np.random.default_rng(0).standard_normal(48000) * 0.1
    whole = encode(noise, container="MP3")
    made = source([whole[: len(whole) // 8], GOOD], max_seconds=1.0, long_clips="cut")
    with pytest.raises(DataError, match=r"row 0: the header says 3\.0"):  # of two: too many
        made.load(0)


def test_clips_used_in_part_are_noted(source, caplog):
    made = source([GOOD] * 3)
    made.note([], "nothing")
    made.note([0, 2], "the text is cut")
    assert made.cut == {"the text is cut": 2}
    assert "2 clips: the text is cut (train.parquet row 0, train.parquet row 2 …)" in caplog.text


@pytest.mark.parametrize(
    ("shuffle", "cache_bytes", "streams"),
    [
        ("auto", 5 * 32000, False),
        ("auto", 5 * 32000 - 1, True),
        ("full", 0, False),
        ("groups", 1 << 30, True),
    ],
)
def test_a_corpus_beyond_the_cache_is_gone_through_by_row_groups(
    source, shuffle, cache_bytes, streams
):
    made = source([GOOD] * 5, shuffle=shuffle, cache_bytes=cache_bytes)
    assert (made.groups is not None) == streams
    if streams:
        assert made.groups.tolist() == [0, 0, 0, 1, 1]
        full = made.fingerprint()
        made.keep([True, False, True, True, True], "test")
        assert made.groups.tolist() == [0, 0, 1, 1]
        assert made.fingerprint() != full
    else:
        assert made.fingerprint() == b""


def test_room_for_row_groups_grows_with_the_pool(source):
    clips = [encode(tone(0.5, 200 + 50 * i)) for i in range(6)]
    made = source(clips, shuffle="groups")
    made.files.row_groups.budget = 0
    made.reserve(4)
    group = made.files.tables[0].read(0).nbytes  # of three rows
    assert made.files.row_groups.budget == pytest.approx(2 * (4 / 3 + 1) * group, rel=0.05)
    made.reserve(1)
    assert made.files.row_groups.budget > 4 * group, "room is never taken away"


def test_texts_are_a_sequence(source):
    made = source([GOOD] * 5, list("abcde"))
    assert len(made.texts) == 5
    assert list(made.texts[1:4]) == ["b", "c", "d"]
    assert made.texts[-1] == "e"
    assert made.texts == list("abcde")
    assert "c" in made.texts


def test_a_row_group_wanted_by_many_threads_is_read_once(source):
    made = source([GOOD] * 12, cache_bytes=0)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(made.load, list(range(12)) * 4))
    assert made.files.row_groups.reads == {(0, group): 1 for group in range(4)}


def test_row_groups_are_read_side_by_side(source):
    made = source([GOOD] * 6, cache_bytes=0)
    table, both = made.files.tables[0], threading.Barrier(2, timeout=60)
    read = table.read
    table.read = lambda group: both.wait() * 0 or read(group)  # passes only with another beside it
    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(made.load, [0, 3]))) == 2


def test_what_a_source_assumes_is_what_a_recipe_says_by_default():
    limits, recipe = SpeechLimits(), Data()
    for key in ("sample_rate", "min_seconds", "max_seconds", "max_bad_fraction", "long_clips"):
        assert getattr(limits, key) == getattr(recipe, key), key
    assert limits.shuffle == recipe.shuffle
    assert limits.cache_bytes == recipe.cache_gib * 2**30
