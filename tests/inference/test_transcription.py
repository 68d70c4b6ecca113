"""Files of any length: how they are read and cut, and what Whisper makes of them."""

from __future__ import annotations

import io
import json
import re
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile
import torch
from typer.testing import CliRunner

from muster.cli import app
from muster.data.speech import audio
from muster.data.speech.whisper_text import WhisperTokens
from muster.errors import MusterError
from muster.evaluate.error_rates import EditCounts, count
from muster.inference import load as inference
from muster.inference.stream import stream
from muster.inference.subtitles import Segment, Transcript
from muster.inference.transcribe import (
    Window,
    WindowTranscript,
    blocks,
    cut,
    is_unreliable,
    merge,
    split_by_timestamps,
    transcribe,
)
from muster.recipe.load import load
from muster.tasks.speech_seq2seq import SpeechSeq2Seq
from real import LIBRISPEECH, WHISPER, needs_speech, needs_whisper
from training import run_training

RATE = 16000
MICRO = [
    "task=speech-seq2seq",
    "model.preset=whisper-micro",
    "data.window=bucket",
    "training.steps=2",
    "training.global_batch_size=4",
    "evaluation.max_tokens=8",
    "evaluation.decoder=greedy",
    "evaluation.ngram=null",
    "evaluation.known_words=false",
    "evaluation.final=false",
]


def noise(seconds: float, level: float = 0.1, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (level * random.standard_normal(round(seconds * RATE))).astype(np.float32)


def phrases(*lengths: float, pause: float = 0.4, floor: float = 0.001) -> np.ndarray:
    """Loud stretches with a faint hiss between them."""
    parts = [np.concatenate([noise(s), noise(pause, floor, 1)]) for s in lengths]
    return np.concatenate(parts)


@pytest.mark.parametrize(("rate", "channels"), [(16000, 1), (8000, 1), (44100, 2), (11025, 1)])
@pytest.mark.parametrize("seconds", [3.3, 20.0, 33.21])
def test_a_file_read_in_blocks_is_the_file_read_whole(tmp_path, rate, channels, seconds):
    random = np.random.default_rng(3)
    shape = (round(seconds * rate), channels)
    soundfile.write(tmp_path / "a.wav", random.uniform(-0.5, 0.5, shape), rate)
    pieces = list(blocks(tmp_path / "a.wav", RATE))
    assert len(pieces) == 1 + seconds // 10
    whole = audio.decode(tmp_path / "a.wav", RATE)
    np.testing.assert_allclose(np.concatenate(pieces), whole, atol=1e-6)


def test_windows_end_in_pauses_and_lose_nothing():
    lengths = [2.0, 7.5, 3.0, 9.0, 1.0, 12.0, 4.0, 8.0, 2.5, 6.0, 11.0, 0.5]
    samples = phrases(*lengths)
    windows = list(cut(iter([samples]), RATE, 30.0))
    np.testing.assert_array_equal(np.concatenate([w.samples for w in windows]), samples)
    assert all(w.seconds <= 30.0 for w in windows)
    assert [w.start for w in windows[1:]] == pytest.approx([w.end for w in windows[:-1]])
    ends = np.cumsum([length + 0.4 for length in lengths])
    for window in windows[:-1]:
        into = window.end - (ends - 0.4)  # each pause begins at 0
        assert ((into > 0.1) & (into < 0.3)).any(), f"{window.end} s is not within a pause"


def test_without_a_pause_neighbours_overlap_by_a_sixth():
    samples = noise(100.0)
    windows = list(cut(iter([samples]), RATE, 30.0))
    for window in windows:
        start = round(window.start * RATE)
        np.testing.assert_array_equal(window.samples, samples[start:][: len(window.samples)])
    for before, after in pairwise(windows):
        assert before.seconds <= 30.0
        assert before.end - after.start == pytest.approx(5.0, abs=0.01)
    assert windows[-1].end == 100.0


def test_windows_do_not_depend_on_the_blocks_they_are_read_in():
    samples = np.concatenate([phrases(9.0, 14.0, 8.0), noise(40.0), phrases(5.0, 6.0)])
    alone = list(cut(iter([samples]), RATE, 12.0))
    sliced = list(cut(iter(np.split(samples, range(1234, len(samples), 30011))), RATE, 12.0))
    assert [(w.start, w.seconds) for w in alone] == [(w.start, w.seconds) for w in sliced]


@pytest.mark.parametrize("seconds", [30.0, 30.01, 30.9, 31.0, 45.0])
def test_no_scrap_is_left_at_the_end(seconds):
    windows = list(cut(iter([noise(seconds)]), RATE, 30.0))
    assert windows[-1].end == pytest.approx(seconds)
    assert all(1.0 <= w.seconds <= 30.0 for w in windows)


def test_a_long_file_is_never_in_memory_whole(tmp_path):
    with soundfile.SoundFile(tmp_path / "long.wav", "w", RATE, 1) as file:
        for minute in range(6):
            file.write(noise(60.0, seed=minute))
    tracemalloc.start()
    found = sum(1 for _ in cut(blocks(tmp_path / "long.wav", RATE), RATE, 30.0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found > 12
    assert peak < 12e6, "as float32 the file takes 23 MB, a window and two blocks 3"


def tokens_and_window() -> tuple[WhisperTokens, Window]:
    return WhisperTokens.plain_bytes(), Window(100.0, noise(20.0), RATE)


def said(tokens: WhisperTokens, text: str, end: bool = True) -> list[int]:
    return tokens.encode(text, timestamps=True) + [tokens.end] * 3 * end


def test_marks_of_time_become_times_of_the_file():
    tokens, window = tokens_and_window()
    heard = split_by_timestamps(
        tokens, window, said(tokens, "<|0.50|> one<|2.00|><|2.40|> two<|30.00|>")
    )
    assert [(s.start, s.end, s.text) for s in heard.segments] == [
        (100.5, 102.0, "one"),
        (102.4, 120.0, "two"),
    ]
    assert heard.end == 120.0
    padding = split_by_timestamps(
        tokens, window, said(tokens, "<|0.00|> one<|19.00|><|24.00|> you<|26.00|>")
    )
    assert [s.text for s in padding.segments] == ["one"]


def test_what_a_model_left_unfinished_is_heard_again_from_there():
    tokens, window = tokens_and_window()
    begun = said(tokens, "<|0.00|> one<|8.00|><|8.20|>")
    assert split_by_timestamps(tokens, window, begun).end == pytest.approx(108.2)
    full = said(tokens, "<|0.00|> one<|8.00|><|8.00|> two and", end=False)
    heard = split_by_timestamps(tokens, window, full)
    assert (heard.end, [s.text for s in heard.segments]) == (108.0, ["one"])
    unmarked = split_by_timestamps(tokens, window, said(tokens, "<|0.00|> one<|8.00|><|8.00|> two"))
    assert (unmarked.end, unmarked.segments[-1].end) == (120.0, 120.0)
    for text in ("<|0.00|> one<|19.50|><|19.50|>", "<|0.00|><|0.00|>"):  # no rest, no progress
        assert split_by_timestamps(tokens, window, said(tokens, text)).end == 120.0


def test_parts_of_a_window_stay_in_order_before_the_next_that_overlaps_it():
    later = [Segment(25.0, 31.0, "four five six"), Segment(31.0, 50.0, "seven eight")]
    parts = [
        WindowTranscript(25.0, 50.0, later),
        WindowTranscript(0.0, 26.0, [Segment(0.0, 26.0, "one two three four")]),
        WindowTranscript(26.0, 30.0, [Segment(26.0, 30.0, "five six")]),
    ]
    text = " ".join(segment.text for segment in merge(parts))
    assert text == "one two three four five six seven eight"


PROSE = "He should notice the position and the temperature of the body, and the marks of violence."


def test_a_model_that_falls_silent_or_repeats_itself_is_not_believed():
    window = Window(100.0, noise(20.0), RATE)

    def heard(text: str, until: float = 118.0) -> WindowTranscript:
        return WindowTranscript(100.0, 120.0, [Segment(100.0, until, text)])

    assert not is_unreliable(window, heard(PROSE))
    assert is_unreliable(window, heard("The"))
    assert not is_unreliable(window, heard("The", until=102.0))
    assert is_unreliable(window, heard("I think that is it. " * 12))
    quiet = Window(100.0, np.concatenate([noise(2.0), noise(18.0, 0.001)]), RATE)
    assert not is_unreliable(quiet, heard("The"))
    assert not is_unreliable(Window(100.0, noise(4.0), RATE), heard("a " * 200))


@pytest.mark.guides
def test_what_is_not_believed_is_heard_again_in_smaller_windows(recordings, monkeypatch):
    recogniser = babbler(False)
    (usual,) = transcribe(recogniser, recordings[1:2])
    monkeypatch.setattr("muster.inference.transcribe.MIN_CHECKED_S", 1.0)
    monkeypatch.setattr("muster.inference.transcribe.SLOW", 1e9)
    (again,) = transcribe(recogniser, recordings[1:2])
    assert len(again.segments) > 2 * len(usual.segments)
    assert all(a.start <= b.start for a, b in pairwise(again.segments))
    assert usual.segments[-1].end <= again.segments[-1].end <= again.duration


@pytest.fixture(scope="module")
def recordings(tmp_path_factory) -> list[Path]:
    """Short, long, and long without a pause; at three rates."""
    folder = tmp_path_factory.mktemp("recordings")
    sounds = [(phrases(1.0), 16000), (phrases(2.0, 3.0, 1.5, 2.5), 8000), (noise(9.0), 22050)]
    paths = [folder / f"{name}.wav" for name in ("short", "long", "dense")]
    for path, (samples, rate) in zip(paths, sounds, strict=True):
        soundfile.write(path, samples, rate)
    return paths


def babbler(timed: bool) -> inference.Recogniser:
    """A random Whisper that says other nonsense whenever it hears something else."""
    options = ["data.tokenizer.kind=bytes", "evaluation.max_tokens=12"]
    task = SpeechSeq2Seq(load("whisper-micro", options))
    task.buckets = (1.28, 2.56, 4.0)
    model = task.build_model()
    torch.manual_seed(7)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, 0.2)
    model.model["decoder"].embed_tokens.weight.data[128:] = 0.0  # letters, signs, not much else
    return inference.Recogniser(task, model.eval(), torch.device("cpu"), 4.0, timed)


@pytest.mark.parametrize("timed", [False, True])
def test_files_come_in_order_and_do_not_depend_on_each_other(recordings, timed):
    recogniser = babbler(timed)
    together = list(transcribe(recogniser, recordings))
    assert [found.file for found in together] == recordings
    assert together == [found for path in recordings for found in transcribe(recogniser, [path])]
    assert len({found.text for found in together}) == 3
    for found, path in zip(together, recordings, strict=True):
        assert found.duration == pytest.approx(soundfile.info(path).duration, abs=1e-3)
        assert all(0 <= s.start <= s.end <= found.duration + 1e-6 for s in found.segments)
        assert all(a.start <= b.start for a, b in pairwise(found.segments))


def test_silence_says_nothing(tmp_path):
    soundfile.write(tmp_path / "silence.wav", np.zeros(5 * RATE), RATE)
    (found,) = transcribe(babbler(False), [tmp_path / "silence.wav"])
    assert (found.text, found.duration) == ("", 5.0)


@pytest.mark.guides
def test_more_windows_than_fit_into_a_pool_are_all_heard(recordings, monkeypatch):
    recogniser = babbler(False)
    usual = list(transcribe(recogniser, recordings))
    monkeypatch.setattr("muster.inference.transcribe.POOL", 2)
    assert list(transcribe(recogniser, recordings)) == usual


@pytest.fixture(scope="module")
def micro(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("micro")
    ranks(1)(run_training, str(folder), MICRO)
    return folder


def test_a_fresh_whisper_hears_no_more_at_a_time_than_it_was_trained_on(micro):
    recogniser = inference.load_recogniser(micro, {"decoder": "beam", "beam_width": 3})
    longest = recogniser.task.source("train").lengths.max()
    assert longest <= recogniser.longest < longest + 0.32 + 1e-6
    assert not recogniser.timestamps
    inputs = recogniser.task.generation_inputs(
        torch.zeros(2, 10, 80), timestamps=recogniser.timestamps
    )
    assert inputs.args[2].beams == 3
    with pytest.raises(MusterError, match="cannot transcribe a stream"):
        next(stream(recogniser, io.BytesIO()))


def run(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["transcribe", *map(str, arguments)])
    if isinstance(done.exception, MusterError):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def test_bad_files_are_named_and_the_good_ones_written(micro, recordings, tmp_path):
    (tmp_path / "text.wav").write_text("no audio")
    soundfile.write(tmp_path / "empty.wav", np.zeros(0), RATE)
    bad = [tmp_path / name for name in ("missing.wav", "text.wav", "empty.wav")]
    files = [bad[0], recordings[0], bad[1], bad[2], recordings[1]]
    code, printed, errors = run(micro, *files, "--format", "json", "--output", tmp_path / "out")
    assert code == 1
    assert printed.split() == [str(tmp_path / "out" / name) for name in ("short.json", "long.json")]
    said = ["no such file", "not readable as audio", "the clip has zero length"]
    which, *lines = errors.splitlines()
    assert re.fullmatch(r"checkpoint: step-\d+, the last", which)
    for line, path, why in zip(lines, bad, said, strict=True):
        assert line.startswith(f"error: {path}: {why}")
    written = json.loads((tmp_path / "out" / "long.json").read_text())
    assert written["file"] == str(recordings[1])
    with pytest.raises(MusterError, match=r"short\.json exists; --force"):
        run(micro, recordings[0], "--format", "json", "--output", tmp_path / "out")


def test_text_is_printed_with_names_only_where_there_are_several(micro, recordings):
    code, several, _ = run(micro, *recordings[:2])
    lines = several.splitlines()
    assert (code, len(lines)) == (0, 2)
    assert [line.split(":")[0] for line in lines] == list(map(str, recordings[:2]))
    assert str(recordings[0]) not in run(micro, recordings[0])[1]


def test_eval_of_a_whisper_shows_counts_and_what_was_said(micro):
    done = CliRunner().invoke(app, ["eval", str(micro), "--split", "validation", "--worst", "1"])
    assert re.search(r"validation: WER .*%, CER .*%, \d+ clips\n\d+ words: \d+ subst", done.stdout)
    assert done.stdout.count("  said  ") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a.wav", "b.wav", "--format", "srt"], "--format srt of several files needs --output"),
        (["-", "--format", "json"], "leave --format and --output out"),
        (["a.wav", "--decoder", "greedy", "--beam", "3"], "--beam needs --decoder beam"),
        (["a/x.wav", "b/x.wav", "--output", "out"], "would both be written to out/x.txt"),
    ],
)
def test_options_that_contradict_are_refused_before_anything_is_loaded(arguments, words):
    with pytest.raises(MusterError, match=words):
        run("nowhere", *arguments)


def clips(numbers: range) -> Iterator[tuple[np.ndarray, str]]:
    for row in pq.read_table(LIBRISPEECH / "test.parquet").take(list(numbers)).to_pylist():
        yield soundfile.read(io.BytesIO(row["audio"]["bytes"]), dtype="float32")[0], row["text"]


@pytest.fixture(scope="module")
def tiny() -> inference.Recogniser:
    return inference.load_recogniser(WHISPER)


def recorded(folder: Path, name: str, samples: np.ndarray) -> Path:
    soundfile.write(folder / f"{name}.wav", samples, RATE)
    return folder / f"{name}.wav"


def errors(recogniser: inference.Recogniser, files: list[Path], texts: list[str]) -> EditCounts:
    total, normalise = EditCounts(), recogniser.task.normalise
    for found, text in zip(transcribe(recogniser, files), texts, strict=True):
        assert isinstance(found, Transcript)
        total += count(normalise(text), normalise(found.text))
    return total


@pytest.mark.full
@needs_whisper
@needs_speech
@pytest.mark.parametrize("numbers", [range(10, 15), range(100)])
def test_a_long_recording_is_recognised_as_well_as_its_clips(tmp_path, tiny, numbers):
    """Two points of word error rate apart at most, in either direction."""
    assert tiny.timestamps
    sounds, texts = zip(*clips(numbers), strict=True)
    random = np.random.default_rng(0)
    pauses = [np.zeros(round(random.uniform(0.3, 1.0) * RATE), np.float32) for _ in sounds]
    long = np.concatenate([part for pair in zip(sounds, pauses, strict=True) for part in pair])
    files = [recorded(tmp_path, str(i), samples) for i, samples in enumerate(sounds)]
    alone = errors(tiny, files, list(texts))
    whole = errors(tiny, [recorded(tmp_path, "long", long)], [" ".join(texts)])
    print(f"word error rate: in one file {whole.wer:.2%}, clip by clip {alone.wer:.2%}")
    assert whole.wer == pytest.approx(alone.wer, abs=0.02)
    assert alone.wer < 0.25


@pytest.mark.full
@needs_whisper
@needs_speech
def test_no_word_is_lost_or_doubled_where_windows_overlap(tmp_path, tiny, monkeypatch):
    """As they do where noise fills the pauses; here no pause is taken for one."""
    monkeypatch.setattr("muster.inference.transcribe.CLEAR_DB", 1000.0)
    sounds, texts = zip(*clips(range(1, 4)), strict=True)
    path = recorded(tmp_path, "dense", np.concatenate(sounds))
    recogniser = replace(tiny, longest=12.0)
    windows = list(cut(blocks(path, RATE), RATE, 12.0))
    assert len(windows) > 2
    assert all(a.end - b.start > 1.9 for a, b in pairwise(windows))
    found = errors(recogniser, [path], [" ".join(texts)])
    assert found.word_insertions + found.word_deletions <= 3
    assert found.wer < 0.15


@pytest.mark.full
@needs_whisper
@needs_speech
def test_a_whisper_folder_writes_subtitles_without_training(tmp_path):
    ((samples, text),) = clips(range(12, 13))
    path = recorded(tmp_path, "talk", samples)
    code, _, _ = run(WHISPER, path, "--format", "vtt", "--output", tmp_path)
    assert code == 0
    header, *cues = (tmp_path / "talk.vtt").read_text().split("\n\n")
    assert header == "WEBVTT"
    assert len(cues) > 1
    said = " ".join(cue.split("\n")[1] for cue in cues)
    assert count(text, said.lower().replace(",", "").replace(".", "")).wer < 0.2


@needs_whisper
def test_a_folder_of_another_kind_or_language_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(MusterError, match="has model_type 'gpt2'"):
        inference.load_recogniser(tmp_path)
    with pytest.raises(MusterError, match="--language: german does not fit"):
        inference.load_recogniser(WHISPER, language="german")
