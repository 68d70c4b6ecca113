from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import soundfile
import torch
from torch import Tensor
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from muster.models.whisper.model import Whisper
from muster.models.whisper.search import Search, apply_rules
from real import LIBRISPEECH, WHISPER, needs_speech, needs_whisper
from whisper_reference import (
    END,
    FIRST_TIMESTAMP,
    NO_TIMESTAMPS,
    START,
    features,
    load,
    make,
    ours,
)

BATCH = 6
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "suppressed": {"suppress": (3, 17, 40, 41), "suppress_first": (END, 7, 8, 52)},
    "timestamps": {"first_timestamp": FIRST_TIMESTAMP},
    "both": {
        "suppress": tuple(range(0, 60, 7)),
        "suppress_first": (END,),
        "first_timestamp": FIRST_TIMESTAMP,
    },
}


def prompt(search: Search, batch: int = BATCH) -> Tensor:
    start = [START] if search.first_timestamp else [START, NO_TIMESTAMPS]
    return torch.tensor([start] * batch)


def generate(
    theirs: WhisperForConditionalGeneration, heard: Tensor, search: Search, **options: Any
) -> list[list[int]]:
    """What transformers' own generate says, without prompt, end and padding."""
    config = theirs.generation_config
    config.is_multilingual, config.max_initial_timestamp_index = False, 50
    config.suppress_tokens = list(search.suppress) or None
    config.begin_suppress_tokens = list(search.suppress_first) or None
    said = theirs.generate(
        heard.transpose(1, 2),
        num_beams=search.beams,
        return_timestamps=search.first_timestamp is not None,
        max_new_tokens=search.limit,
        force_unique_generate_call=True,
        **options,
    )
    return [row[len(prompt(search)[0]) :] for row in stripped(said, search.end)]


def stripped(said: Tensor, end: int) -> list[list[int]]:
    return [row[: row.index(end)] if end in row else row for row in said.tolist()]


def small(seed: int, ending: float) -> WhisperForConditionalGeneration:
    theirs = make(seed, ending)
    theirs.generation_config.no_timestamps_token_id = NO_TIMESTAMPS
    return theirs


@pytest.mark.parametrize(
    ("case", "beams"),
    [
        pytest.param(case, beams, marks=() if beams == 1 or case == "both" else pytest.mark.full)
        for case in CASES
        for beams in (1, 2, 5)
    ],
)
def test_small_models_say_what_they_say_in_transformers(case: str, beams: int, tmp_path: Path):
    lengths = set()
    for seed in range(3):
        theirs = small(seed, ending=0.5)
        model = ours(theirs, tmp_path / str(seed))
        heard = features(BATCH, seed=seed)
        for limit in (4, 18):
            search = Search(END, limit, beams, **CASES[case])
            found = stripped(model(heard, prompt(search), search), END)
            assert found == generate(theirs, heard, search)
            lengths |= {len(row) for row in found if len(row) < limit}
    assert len(lengths) > 2  # texts ended, at several lengths


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_cached_search_is_one_that_starts_over_at_every_token(
    case: str, beams: int, tmp_path: Path
):
    """The best next token, given all before, computed from nothing; for beams, the best text's
    own probability."""
    model = ours(make(2, 0.5), tmp_path)
    search = Search(END, 12, beams, **CASES[case])
    heard = features(BATCH)
    found = model(heard, prompt(search), search)
    whole = torch.cat([prompt(search), found], 1)
    logits = model(heard, whole[:, :-1])[:, len(prompt(search)[0]) - 1 :, :]
    if beams == 1:
        ended = torch.zeros(BATCH, dtype=torch.bool)
        for step in range(found.shape[1]):
            best = apply_rules(search, logits[:, step], found[:, :step]).argmax(1)
            assert torch.equal(found[~ended, step], best[~ended])
            ended |= found[:, step] == END
        return
    alone = dataclasses.replace(search, beams=1)
    greedy = model(heard, prompt(search), alone)
    better = mean_log_prob(model, heard, search, found) - mean_log_prob(
        model, heard, search, greedy
    )
    assert (better > -1e-5).float().mean() > 0.6
    assert better.max() > 0.01


def mean_log_prob(model: Whisper, heard: Tensor, search: Search, said: Tensor) -> Tensor:
    whole = torch.cat([prompt(search), said], 1)
    logits = model(heard, whole[:, :-1])[:, len(prompt(search)[0]) - 1 :, :]
    each = logits.log_softmax(-1).gather(-1, said[..., None])[..., 0]
    after = (said == END).cumsum(1) - (said == END).long() > 0
    return each.masked_fill(after, 0).sum(1) / (~after).sum(1)


@pytest.mark.parametrize("beams", [1, 3])
@torch.no_grad()
def test_a_row_says_the_same_alone_and_in_company(beams: int, tmp_path: Path):
    model = ours(make(0, 0.5), tmp_path)
    search = Search(END, 15, beams)
    heard = features(BATCH)
    together = stripped(model(heard, prompt(search), search), END)
    assert len({len(row) for row in together}) > 1
    for row in range(BATCH):
        alone = model(heard[row : row + 1], prompt(search, 1), search)
        assert stripped(alone, END) == [together[row]]


@pytest.mark.parametrize("beams", [1, 3])
@torch.no_grad()
def test_going_on_for_the_others_changes_nothing(beams: int, tmp_path: Path):
    """Every step asks; whoever is done pads with the end for as long as it is told to."""
    model = ours(make(0, 0.5), tmp_path)
    heard = features(BATCH)[:2]
    asked: list[bool] = []

    def ask(unfinished: bool) -> bool:
        asked.append(unfinished)
        return True

    search = Search(END, 20, beams)
    short = model(heard, prompt(search, 2), search)
    assert short.shape[1] < 20
    company = model(heard, prompt(search, 2), dataclasses.replace(search, any_rank=ask))
    assert company.shape[1] == 20
    assert stripped(company, END) == stripped(short, END)
    assert (company[:, short.shape[1] :] == END).all()
    assert asked == [step < short.shape[1] for step in range(1, 20)]


@torch.no_grad()
def test_the_prompt_and_what_is_said_fit_the_positions(tmp_path: Path):
    model = ours(make(0), tmp_path)
    said = model(features(1), prompt(Search(END, 1), 1), Search(END, 100, suppress=(END,)))
    assert said.shape[1] == 24 - 2
    with pytest.raises(ValueError, match="no position left"):
        model(features(1), torch.full((1, 24), 5), Search(END, 1))


@pytest.mark.guides
def test_a_search_needs_no_gradients_and_leaves_compiled_layers_alone(tmp_path: Path):
    model = ours(make(2, 0.5), tmp_path)
    search = Search(END, 10, 2)
    expected = model(features(), prompt(search, 3), search)
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    for layer in model.model["decoder"].layers.values():
        layer.forward = torch.compile(layer.forward, backend=backend)
    found = model(features(), prompt(search, 3), search)
    assert torch.equal(found, expected)
    assert not found.requires_grad
    assert not compiled
    model(features(), prompt(search, 3))
    assert compiled


@pytest.fixture(scope="module")
def speech() -> Tensor:
    """Log-mel frames [clips, 3000, 80] of two short sentences."""
    table = pq.read_table(sorted(LIBRISPEECH.glob("test*.parquet"))[0]).take([57, 86])
    clips = [soundfile.read(io.BytesIO(row["bytes"]))[0] for row in table["audio"].to_pylist()]
    extract = WhisperFeatureExtractor.from_pretrained(WHISPER)
    mels: Tensor = extract(clips, sampling_rate=16000, return_tensors="pt").input_features
    return mels.transpose(1, 2)


@pytest.fixture(scope="module")
def tiny() -> tuple[Whisper, WhisperForConditionalGeneration]:
    theirs = WhisperForConditionalGeneration.from_pretrained(WHISPER, dtype=torch.float32).eval()
    config = theirs.generation_config
    config.max_initial_timestamp_index, config.suppress_tokens = 50, None
    return load(WHISPER), theirs


@needs_whisper
@needs_speech
@pytest.mark.full
@pytest.mark.parametrize(("beams", "timestamps"), [(1, False), (1, True), (5, False)])
@torch.no_grad()
def test_tiny_en_hears_what_it_hears_in_transformers(
    beams: int, timestamps: bool, speech: Tensor, tiny: tuple[Whisper, Any]
):
    model, theirs = tiny
    start, first = ([50257], 50363) if timestamps else ([50257, 50362], None)
    search = Search(50256, 30, beams, suppress_first=(220, 50256), first_timestamp=first)
    found = model(speech, torch.tensor([start] * len(speech)), search)
    said = stripped(found, 50256)
    assert all(len(row) > 3 for row in said)
    expected = theirs.generate(
        speech.transpose(1, 2),
        num_beams=beams,
        return_timestamps=timestamps,
        max_new_tokens=30,
        force_unique_generate_call=True,
    )
    assert said == [row[len(start) :] for row in stripped(expected, 50256)]
