"""Checkpoints in use: files, live pipes, scores."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from muster import inference
from muster.errors import MusterError
from muster.train.evaluate import evaluate
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


def test_a_live_pipe_gives_the_text_of_the_whole_file(causal, tmp_path):
    recogniser = inference.load_recogniser(causal)
    said = []
    for number, samples in enumerate(clips(6)):
        path = tmp_path / f"{number}.wav"
        soundfile.write(path, samples, 16000)
        ((_, offline),) = inference.transcribe(recogniser, [path])
        live = "".join(inference.stream(recogniser, io.BytesIO(samples.tobytes())))
        assert live == offline
        said.append(offline)
    assert any(said), "sixty steps must be enough to say something"


def test_text_does_not_depend_on_what_else_is_in_the_batch(causal, tmp_path):
    recogniser = inference.load_recogniser(causal)
    paths = []
    for number, samples in enumerate(clips(5)):
        paths.append(tmp_path / f"{number}.wav")
        soundfile.write(paths[-1], samples, 16000)
    together = dict(inference.transcribe(recogniser, paths))
    alone = {p: text for path in paths for p, text in inference.transcribe(recogniser, [path])}
    assert together == alone


def test_a_model_that_looks_ahead_is_refused_for_streaming_by_name(ranks, tmp_path):
    ranks(1)(run_training, str(tmp_path), ["training.steps=1"])
    with pytest.raises(MusterError, match="lmu-micro looks ahead"):
        list(inference.stream(inference.load_recogniser(tmp_path), io.BytesIO()))


def test_a_file_that_is_no_audio_is_named(causal, tmp_path):
    (tmp_path / "noise.wav").write_bytes(b"not audio")
    with pytest.raises(MusterError, match=r"noise\.wav"):
        list(inference.transcribe(inference.load_recogniser(causal), [tmp_path / "noise.wav"]))


def scored(mesh, folder: str) -> tuple[dict[str, float], list[tuple[int, str]]]:
    from contextlib import nullcontext

    job = make_job(mesh, folder, ["training.steps=60", "training.warmup_steps=5", *CAUSAL])
    assert job.start == 60
    result = evaluate(job.task, job.engine, "test", mesh, 16, nullcontext)
    return result.scores, [(e.id, e.hypothesis) for e in result.worst]


@pytest.mark.parametrize("world", [2, 4])
def test_evaluation_over_ranks_equals_one_process(ranks, causal, world):
    alone = ranks(1)(scored, str(causal))[0]
    together = ranks(world)(scored, str(causal))
    assert all(part == alone for part in together)
    assert alone[0]["clips"] == 300


def test_the_beam_and_an_ngram_model_score_through_the_same_door(causal, tmp_path):
    from muster.evaluate.ngram import build

    texts = ["one two three", "half past nine", "the third of march"]
    build(texts, 2).write_arpa(tmp_path / "lm.arpa")
    options = {"decoder": "beam", "ngram": str(tmp_path / "lm.arpa")}
    recogniser = inference.load_recogniser(causal, options)
    logits = torch.randn(2, 12, recogniser.task.vocabulary.size)
    assert len(recogniser.task.decode(logits, torch.tensor([12, 7]))) == 2
