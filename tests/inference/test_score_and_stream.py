"""Checkpoints in use: files, live pipes, scores."""

from __future__ import annotations

import io
import re
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from typer.testing import CliRunner

from arpa import write_arpa
from muster.cli import app, use
from muster.errors import MusterError
from muster.inference import load as inference
from muster.inference.stream import stream
from muster.inference.transcribe import transcribe
from muster.training.evaluate import evaluate
from training import make_job, run_training

GREEDY = ["evaluation.decoder=greedy", "evaluation.ngram=null", "evaluation.known_words=false"]
CAUSAL = ["model.preset=lmu-micro-causal", "data.normalize=fixed", *GREEDY]


def clips(count: int) -> list[np.ndarray]:
    """Some test clips of the embedded corpus, as 16-bit numbers."""
    from muster.recipe.load import load
    from muster.tasks.speech_ctc import SpeechCTC

    source = SpeechCTC(load("speech")).source("test")
    return [(source.load(i).samples * 32767).astype("<i2") for i in range(count)]


@pytest.fixture(scope="module")
def causal(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("causal")
    ranks(1)(run_training, str(folder), ["training.steps=60", "training.warmup_steps=5", *CAUSAL])
    return folder


@pytest.mark.guides
def test_a_live_pipe_gives_the_text_of_the_whole_file(causal, tmp_path):
    recogniser = inference.load_recogniser(causal)
    said = []
    for number, samples in enumerate(clips(3)):
        path = tmp_path / f"{number}.wav"
        soundfile.write(path, samples, 16000)
        (offline,) = (found.text for found in transcribe(recogniser, [path]))
        live = "".join(stream(recogniser, io.BytesIO(samples.tobytes())))
        assert live == offline
        said.append(offline)
    assert any(said), "sixty steps must be enough to say something"


def test_text_does_not_depend_on_what_else_is_in_the_batch(causal, tmp_path):
    recogniser = inference.load_recogniser(causal)
    paths = []
    for number, samples in enumerate(clips(5)):
        paths.append(tmp_path / f"{number}.wav")
        soundfile.write(paths[-1], samples, 16000)
    together = list(transcribe(recogniser, paths))
    assert [found.file for found in together] == paths
    assert together == [found for path in paths for found in transcribe(recogniser, [path])]


def test_a_model_that_looks_ahead_is_refused_for_streaming_by_name(ranks, tmp_path):
    ranks(1)(run_training, str(tmp_path), ["training.steps=1"])
    with pytest.raises(MusterError, match="lmu-micro looks ahead"):
        list(stream(inference.load_recogniser(tmp_path), io.BytesIO()))


def test_a_short_file_is_heard_whole_and_a_long_one_in_windows(causal, tmp_path):
    """Up to 30 s the text is what the model makes of the whole clip at once."""
    from muster.data.speech.source import SpeechSample

    recogniser = inference.load_recogniser(causal)
    samples = np.concatenate([np.pad(clip, (0, 8000)) for clip in clips(16)])
    texts = []
    for name, part in (("short", samples[: 29 * 16000]), ("long", samples)):
        soundfile.write(tmp_path / f"{name}.wav", part, 16000)
        (found,) = transcribe(recogniser, [tmp_path / f"{name}.wav"])
        texts.append((found.text, len(found.segments)))
    task = recogniser.task
    whole = samples[: 29 * 16000].astype(np.float32) / 32768
    batch = task.prepare(task.collate([SpeechSample(0, whole, "")], None))
    with torch.no_grad():
        (expected,) = task.decode(*recogniser.model(batch["features"], batch["frames"]))
    assert texts[0] == (expected, 1)
    assert texts[1][1] > 1
    assert len(texts[1][0]) > len(texts[0][0])


def test_eval_prints_rates_counts_and_the_worst_clips(causal, monkeypatch):
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(use, "working", lambda *words: nullcontext(lambda *done: told.append(done)))
    done = CliRunner().invoke(app, ["eval", str(causal), "--decoder", "greedy", "--worst", "2"])
    rates = re.search(r"test: WER (.*)%, CER .*%, 31 clips\n", done.stdout)
    counts = re.search(r"(\d+) words: (\d+) subst.*, (\d+) deletions, (\d+) insert", done.stdout)
    words, *edits = map(int, counts.groups())
    assert float(rates[1]) == pytest.approx(100 * sum(edits) / words, abs=0.01)
    assert done.stdout.count("  said  ") == done.stdout.count("  heard ") == 2
    assert told == [(0, 2), (1, 2)]


def test_eval_takes_either_decoder_and_refuses_an_ngram_model_without_the_beam(causal):
    asked = ["eval", str(causal), "--split", "validation"]
    done = CliRunner().invoke(app, [*asked, "--decoder", "beam", "--beam", "4"])
    assert "validation: WER" in done.stdout
    refused = CliRunner().invoke(app, [*asked, "--decoder", "greedy", "--ngram", "x"])
    assert "--ngram needs" in str(refused.exception)


def scored(mesh, folder: str) -> tuple[dict[str, float], list[tuple[int, str]]]:
    job = make_job(mesh, folder, ["training.steps=60", "training.warmup_steps=5", *CAUSAL])
    assert job.start == 60
    result = evaluate(job.task, job.engine, "test", mesh, 16, nullcontext)
    return result.scores, [(e.id, e.hypothesis) for e in result.worst]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_evaluation_over_ranks_equals_one_process(ranks, causal, world):
    alone = ranks(1)(scored, str(causal))[0]
    together = ranks(world)(scored, str(causal))
    assert all(part == alone for part in together)
    assert alone[0]["clips"] == 31


def test_the_beam_and_an_ngram_model_score_through_the_same_door(causal, tmp_path):
    from muster.evaluate.ngram import build

    texts = ["one two three", "half past nine", "the third of march"]
    write_arpa(build(texts, 2), tmp_path / "lm.arpa")
    options = {"decoder": "beam", "ngram": str(tmp_path / "lm.arpa")}
    recogniser = inference.load_recogniser(causal, options)
    logits = torch.randn(2, 12, recogniser.task.vocabulary.size)
    assert len(recogniser.task.decode(logits, torch.tensor([12, 7]))) == 2
