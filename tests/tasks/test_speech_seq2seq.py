"""Whisper as a task: what it learns from, what it is asked, what it is scored by."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from muster.data.loader import IGNORE
from muster.data.speech.audio import SAMPLE_RATE
from muster.data.speech.source import SpeechSample
from muster.errors import RecipeError
from muster.evaluate.error_rates import count
from muster.parallel.materialise import materialise
from muster.recipe.load import load
from muster.tasks.base import Example
from muster.tasks.speech_seq2seq import SpeechSeq2Seq
from real import LIBRISPEECH, WHISPER, needs_speech, needs_whisper

CPU = torch.device("cpu")


def call(model: Any, task: SpeechSeq2Seq, batch: Any) -> Any:
    inputs = task.inputs(batch)
    return model(*inputs.args, **inputs.shared)


def task_of(*overrides: str, recipe: str = "whisper-micro") -> SpeechSeq2Seq:
    return SpeechSeq2Seq(load(recipe, overrides))


def pretrained(*overrides: str) -> SpeechSeq2Seq:
    return task_of(
        f"model.pretrained={WHISPER}", f"data.train={LIBRISPEECH}", *overrides, recipe="whisper"
    )


def model_of(task: SpeechSeq2Seq) -> torch.nn.Module:
    with torch.device("meta"):
        model = task.build_model()
    materialise(model, task.weights(), CPU, CPU)
    return model


def clip(i: int, seconds: float, text: str) -> SpeechSample:
    noise = np.random.default_rng(i).normal(0, 0.1, round(seconds * SAMPLE_RATE)).astype(np.float32)
    return SpeechSample(i, noise, text)


@pytest.fixture(scope="module")
def micro() -> SpeechSeq2Seq:
    return task_of("data.spec_augment=null")


def test_the_decoder_reads_prompt_and_text_and_learns_text_and_end(micro):
    batch = micro.collate([clip(0, 1, "seven"), clip(1, 1.5, "twenty past nine")], 0)
    tokens = micro.tokens
    assert micro.prompt == [tokens.start, tokens.no_timestamps]
    for row, text in enumerate(["seven", "twenty past nine"]):
        ids = tokens.encode(text)
        assert batch["tokens"][row, : 2 + len(ids)].tolist() == [*micro.prompt, *ids]
        learnt = batch["targets"][row]
        assert learnt[learnt != IGNORE].tolist() == [*ids, tokens.end]
        assert learnt[:1].tolist() == [IGNORE]
        assert learnt[1] == ids[0]
    assert batch.units == int((batch["targets"] != IGNORE).sum())


def test_a_window_follows_the_longest_clip_of_the_global_batch(micro):
    micro_batch = [clip(0, 1, "one"), clip(1, 1.5, "two")]
    longest = micro.buckets[-2] - 0.1
    batch = micro.collate(micro_batch, 0, longest)
    assert batch["samples"].shape[1] == round(
        float(micro.windows(np.array([longest]), training=True)[0]) * SAMPLE_RATE
    )
    assert batch.cells == batch["samples"].numel()
    assert batch.filled == round(2.5 * SAMPLE_RATE)


def test_a_clip_longer_than_a_fixed_window_is_scored_whole():
    task = task_of("data.window=2", "data.spec_augment=null")
    lengths = np.array([0.5, 2.0, 2.5])
    assert task.windows(lengths, training=False).tolist() == [2, 2, 30]
    assert task.source("train").lengths.max() <= 2
    assert task.source("test").lengths.max() > 2


def as_if_pretrained(micro: SpeechSeq2Seq, *overrides: str) -> SpeechSeq2Seq:
    """The same task, with weights that another has pretrained."""
    recipe = load("whisper-micro", ["model.pretrained=elsewhere", *overrides])
    return SpeechSeq2Seq(recipe, json.loads(json.dumps(micro.assets)))


def test_pretrained_weights_are_scored_in_the_window_they_know_unless_told_otherwise(micro):
    lengths = np.array([0.5, 1.5])
    task = as_if_pretrained(micro, "data.window=bucket")
    assert task.windows(lengths, training=True).max() < 5
    assert task.windows(lengths, training=False).tolist() == [30, 30]
    assert task.collate([clip(0, 1.0, "one")], None, 1.0)["samples"].shape[1] == 30 * SAMPLE_RATE
    asked = as_if_pretrained(micro, "data.window=bucket", "evaluation.window=bucket")
    assert asked.windows(lengths, training=False).max() < 5
    assert micro.windows(lengths, training=False).max() < 5, "a fresh model knows its own window"


def test_a_wer_above_100_percent_is_explained_with_the_key_to_change(micro):
    said, heard = "one two", "thank you " * 20
    counts = {**vars(count(said, heard))}
    worst = [Example(0, said, heard, 40)]
    short = as_if_pretrained(micro, "evaluation.window=bucket")
    (words,) = short.remarks(short.summarise(counts), worst)
    assert "a WER above 100 %: 2 words were said, and 38 of the 40 edits are insertions" in words
    assert "repeats itself, as in 'thank you thank you" in words
    assert words.endswith("set evaluation.window=30")
    (words,) = micro.remarks(micro.summarise(counts), [Example(0, said, "three four five", 3)])
    assert "repeats" not in words.partition("insertions")[2].partition(". ")[0]
    assert "evaluation.max_tokens (now 224)" in words
    assert ("training.ctc_weight=0.3" in words) == (not micro.recipe.training.ctc_weight)
    right = {**vars(count(said, said))}
    assert micro.remarks(micro.summarise(right), []) == []


def test_scoring_takes_its_own_window_whatever_the_split():
    task = task_of("data.window=30", "evaluation.window=bucket")
    lengths = np.array([0.5, 2.0, 2.5])
    assert task.windows(lengths, training=True).tolist() == [30, 30, 30]
    assert task.windows(lengths, training=False).max() < 5
    batch = task.collate([clip(0, 1.0, "one")], None, 1.0)
    assert batch["samples"].shape[1] < 2 * SAMPLE_RATE


def test_marks_of_time_beyond_thirty_seconds_leave_their_clip_out(tmp_path):
    from data.clips import encode, tone, write_parquet

    texts = ["<|0.00|>one<|0.80|>", "<|0.00|>two<|31.00|>", "<|0.00|>three<|30.00|>"]
    write_parquet(tmp_path / "train.parquet", [encode(tone(1.0))] * 3, texts)
    write_parquet(tmp_path / "test.parquet", [encode(tone(1.0))] * 3, texts)
    options = [f"data.train={tmp_path}", "data.tokenizer.kind=bytes", "data.timestamps=true"]
    task = task_of(*options)
    for split in ("train", "test"):
        assert list(task.source(split).texts) == [texts[0], texts[2]]
    source = task.source("train")
    batch = task.collate([source.load(i) for i in range(2)], 0)
    learnt = batch["targets"][0]
    assert task.tokens.segments(learnt[learnt != IGNORE].tolist())[0][:2] == (0.0, 0.8)
    plain = task_of(*options, "data.timestamps=false")
    assert len(plain.source("train")) == 3


def test_the_loss_of_a_batch_does_not_depend_on_how_it_is_cut(micro):
    clips = [clip(i, 0.7 + 0.3 * i, f"number {i}") for i in range(4)]
    model, longest = model_of(micro).eval(), 1.6

    def loss(parts: list[list[SpeechSample]]) -> torch.Tensor:
        batches = [micro.prepare(micro.collate(part, None, longest)) for part in parts]
        outputs = [call(model, micro, batch) for batch in batches]
        return sum(micro.loss(o, b) for o, b in zip(outputs, batches, strict=True))

    whole = loss([clips])
    assert torch.allclose(whole, loss([clips[:1], clips[1:]]), rtol=1e-5)
    alone = [micro.prepare(micro.collate([c], None)) for c in clips]
    apart = sum(micro.loss(call(model, micro, b), b) for b in alone)
    assert not torch.allclose(whole, apart, rtol=1e-5)  # padding is heard, so windows matter


def test_label_smoothing_spreads_over_the_vocabulary(micro):
    smooth = SpeechSeq2Seq(
        load("whisper-micro", ["training.label_smoothing=0.1"]),
        json.loads(json.dumps(micro.assets)),
    )
    batch = smooth.collate([clip(0, 1, "seven")], None)
    logits = torch.randn(*batch["tokens"].shape, smooth.config.vocab + 3, dtype=torch.float64)
    share = torch.log_softmax(logits[..., : smooth.config.vocab], -1)[0]
    expected = 0.0
    for row, target in zip(share, batch["targets"][0].tolist(), strict=True):
        if target != IGNORE:
            expected -= 0.9 * row[target] + 0.1 * row.mean()
    assert float(smooth.loss(logits, batch)) == pytest.approx(float(expected), rel=1e-6)


def test_a_transcript_longer_than_the_decoder_is_left_out_or_cut(tmp_path, micro):
    from data.clips import encode, tone, write_parquet

    long = "six hundred and " * 200
    sound = encode(tone(1.0))
    write_parquet(tmp_path / "train.parquet", [sound] * 3, ["one two", long, "three four"])
    options = [f"data.train={tmp_path}", "data.tokenizer.kind=bytes", "data.window=30"]
    skipping = task_of(*options)
    assert list(skipping.source("train").texts) == ["one two", "three four"]
    cutting = task_of(*options, "data.long_texts=cut")
    source = cutting.source("train")
    assert len(source) == 3
    batch = cutting.collate([source.load(i) for i in range(3)], 0)
    assert batch["tokens"].shape[1] == cutting.config.target_positions
    assert int((batch["targets"] != IGNORE).sum()) == batch.units


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.sample_rate=8000", r"data\.sample_rate: Whisper needs 16000 Hz, not 8000"),
        (
            "model.preset=lmu-micro",
            r"model\.preset: 'lmu-micro' is no Whisper; speech-seq2seq takes whisper-",
        ),
        ("data.tokenizer.kind=characters", r"data\.tokenizer\.kind: characters is for speech-ctc"),
        ("data.tokenizer.kind=huggingface", r"data\.tokenizer\.path: needed for"),
        ("data.window=7.03", r"data\.window: 7\.03 s; the encoder takes multiples of 0\.02 s"),
        (
            "model.vocab_size=100",
            r"data\.tokenizer: it has \d+ ids, the model's embedding only 100",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(override, words):
    with pytest.raises(RecipeError, match=words):
        task_of(override)


@needs_whisper
@needs_speech
def test_a_suppressed_token_that_the_model_does_not_have_is_refused(tmp_path):
    for file in WHISPER.iterdir():
        (tmp_path / file.name).symlink_to(file)
    rules = json.loads((WHISPER / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").unlink()
    rules["suppress_tokens"] = [51864]
    (tmp_path / "generation_config.json").write_text(json.dumps(rules))
    with pytest.raises(RecipeError, match="suppresses token 51864, but the model has only 51864"):
        task_of(f"model.pretrained={tmp_path}", f"data.train={LIBRISPEECH}", recipe="whisper")


def test_a_checkpoint_carries_all_that_using_it_takes(micro):
    again = SpeechSeq2Seq(micro.recipe, json.loads(json.dumps(micro.assets)))
    assert again.buckets == micro.buckets
    assert again.config == micro.config
    assert again.prompt == micro.prompt
    assert again.tokens.encode("half past ten") == micro.tokens.encode("half past ten")
    assert again.generation.suppress == micro.generation.suppress


@pytest.mark.full
@needs_whisper
@needs_speech
def test_loss_and_gradient_are_those_of_transformers():
    from transformers import WhisperForConditionalGeneration

    task = pretrained("data.window=30", "data.spec_augment=null")
    source = task.source("train")
    batch = task.prepare(task.collate([source.load(3)], 0, 30.0))
    ours = model_of(task)
    loss = task.loss(call(ours, task, batch), batch) / batch.units
    loss.backward()
    theirs = WhisperForConditionalGeneration.from_pretrained(WHISPER, dtype=torch.float32)
    expected = theirs(
        input_features=batch["features"].transpose(1, 2),
        decoder_input_ids=batch["tokens"],
        labels=batch["targets"],
    ).loss
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    norms = [
        torch.nn.utils.get_total_norm([p.grad for p in m.parameters() if p.grad is not None])
        for m in (ours, theirs)
    ]
    assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-4)


@pytest.mark.full
@needs_whisper
@needs_speech
def test_pretrained_whisper_hears_what_transformers_hears():
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    task = pretrained("data.window=30")
    source = task.source("test")
    shortest = np.argsort(source.lengths)[:4].tolist()
    samples = [source.load(i) for i in shortest]
    batch = task.prepare(task.collate(samples, None, 30.0))
    with torch.no_grad():
        said = task.decode(model_of(task).eval()(*task.eval_inputs(batch, bool).args))
    theirs = WhisperForConditionalGeneration.from_pretrained(WHISPER, dtype=torch.float32)
    processor = WhisperProcessor.from_pretrained(WHISPER)
    features = processor(
        [s.samples for s in samples], sampling_rate=SAMPLE_RATE, return_tensors="pt"
    )
    ids = theirs.generate(features.input_features, max_length=64)
    assert said == [t.strip() for t in processor.batch_decode(ids, skip_special_tokens=True)]
    assert task.summarise(task.score(ids, batch).counts)["wer"] < 0.4


@needs_whisper
def test_the_folder_named_is_what_the_error_names(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(RecipeError, match=r"model\.pretrained: .*gpt2"):
        task_of(f"model.pretrained={tmp_path}", recipe="whisper-micro")


def test_masks_fall_on_the_clip_and_follow_it():
    task = task_of("data.spec_augment.warp=0")
    samples = [clip(7, 1.0, "one"), clip(8, 1.2, "two")]
    together = task.prepare(task.collate(samples, 3, 2.0))
    alone = task.prepare(task.collate(samples[1:], 3, 2.0))
    assert torch.equal(together["features"][1], alone["features"][0])
    other = task.prepare(task.collate(samples, 4, 2.0))
    assert not torch.equal(together["features"], other["features"])
    plain = task.prepare(task.collate(samples, None, 2.0))
    masked = (together["features"] == 0) & (plain["features"] != 0)
    assert masked.any()
