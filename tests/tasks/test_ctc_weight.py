"""`training.ctc_weight`: a CTC head on Whisper's encoder, in the loss, in checkpoints and in decoding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from muster.data.speech.source import SpeechSample
from muster.errors import CheckpointError, RecipeError
from muster.models.whisper.hybrid import HybridWhisper
from muster.parallel.conflicts import refuse_conflicts
from muster.parallel.layout import Layout
from muster.recipe.load import load
from muster.tasks.speech_seq2seq import SpeechSeq2Seq
from tasks.test_speech_seq2seq import call, clip, model_of, task_of

SMALL = ["model.shape={layers:1,width:16,heads:2}", "data.spec_augment=null"]
WEIGHT = 0.3


@pytest.fixture(scope="module")
def task() -> SpeechSeq2Seq:
    return task_of(*SMALL, f"training.ctc_weight={WEIGHT}")


@pytest.fixture(scope="module")
def model(task: SpeechSeq2Seq) -> HybridWhisper:
    return model_of(task).eval()


CLIPS = [clip(0, 1, "seven"), clip(1, 1.5, "three thirty"), clip(2, 1.2, "all good")]


def ctc_by_torch(logits: Tensor, task: SpeechSeq2Seq, texts: list[str]) -> float:
    """One clip after the other, in float64."""
    total = 0.0
    for row, text in zip(logits.double().log_softmax(-1), texts, strict=True):
        ids = torch.tensor([task.tokens.encode(text)])
        lengths = torch.tensor([len(row)]), torch.tensor([ids.shape[1]])
        total += float(
            torch.nn.functional.ctc_loss(
                row[:, None], ids, *lengths, blank=task.tokens.end, reduction="sum"
            )
        )
    return total


def test_the_loss_is_the_weighted_sum_of_both(task, model):
    batch = task.prepare(task.collate(CLIPS, 0))
    with torch.no_grad():
        logits, head = call(model, task, batch)
        found = float(task.loss((logits, head), batch))
    assert head.shape == (3, batch["features"].shape[1] // 2, task.tokens.end + 1)
    plain = task_of(*SMALL)
    decoder = float(plain.loss(logits, batch))
    ctc = ctc_by_torch(head, task, [c.text for c in CLIPS])
    assert found == pytest.approx((1 - WEIGHT) * decoder + WEIGHT * ctc, rel=1e-5)


def test_a_clip_that_cannot_be_read_adds_to_neither(task, model):
    broken = SpeechSample(3, CLIPS[0].samples, "seven", broken=True)
    batches = [task.prepare(task.collate(c, 0, 1.5)) for c in (CLIPS, [*CLIPS, broken])]
    with torch.no_grad():
        losses = [task.loss(call(model, task, b), b) for b in batches]
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-6)
    assert batches[0].units == batches[1].units


def test_how_a_batch_is_cut_changes_nothing(task, model):
    def loss(parts: list[list[SpeechSample]]) -> float:
        batches = [task.prepare(task.collate(part, 0, 1.5)) for part in parts]
        with torch.no_grad():
            return sum(float(task.loss(call(model, task, b), b)) for b in batches)

    assert loss([CLIPS]) == pytest.approx(loss([CLIPS[:1], CLIPS[1:]]), rel=1e-5)


def test_the_decoder_and_the_encoder_begin_as_without_the_head(task, model):
    plain = dict(model_of(task_of(*SMALL)).named_parameters())
    mine = dict(model.named_parameters())
    assert set(mine) - set(plain) == {"ctc_head.weight", "ctc_head.bias"}
    assert all(torch.equal(mine[name], p) for name, p in plain.items())
    assert float(mine["ctc_head.weight"].detach().std()) > 0.1


def test_timestamps_are_no_text_for_the_head():
    task = task_of(*SMALL, "training.ctc_weight=0.5", "data.timestamps=true")
    batch = task.collate([clip(0, 1, "<|0.00|>seven<|0.80|>")], 0)
    assert batch["ctc_targets"].tolist() == task.tokens.encode("seven")
    assert int(batch["ctc_target_lengths"]) == len(task.tokens.encode("seven"))
    assert task.eval_inputs(task.prepare(batch), bool).args[2].ctc_weight == 0


def test_a_clip_with_more_tokens_than_frames_is_left_out_and_counted(tmp_path):
    from data.clips import encode, tone, write_parquet

    texts = ["one two", "x" * 10, "abcdefghijklmnopqrst", "abcdefghijklmnopqrstu"]
    seconds = [1.0, 0.36, 0.4, 0.4]  # frames of 20 ms: ten equal letters take 19
    clips = [encode(tone(s)) for s in seconds]
    write_parquet(tmp_path / "train.parquet", clips, texts)
    source = task_of(f"data.train={tmp_path}", "training.ctc_weight=0.5").source("train")
    assert list(source.texts) == [texts[0], texts[2]]
    ((why, count),) = source.left_out.items()
    assert count == 2
    assert "more tokens than the encoder has frames" in why
    assert len(task_of(f"data.train={tmp_path}").source("train")) == 4


@pytest.mark.parametrize(
    ("recipe", "overrides", "words"),
    [
        (
            "speech",
            ["training.ctc_weight=0.3"],
            r"training\.ctc_weight: 0\.3 .* this is speech-ctc",
        ),
        ("gpt-micro", ["training.ctc_weight=0.3"], r"training\.ctc_weight: .* this is causal-lm"),
        ("whisper-micro", ["training.ctc_weight=1"], r"training\.ctc_weight: .*less than 1"),
        (
            "whisper-micro",
            ["training.ctc_weight=0.3", "+model.lora={rank: 2}"],
            r"training\.ctc_weight: .*model\.lora",
        ),
        ("whisper-micro", ["evaluation.ctc_weight=0.3"], r"evaluation\.ctc_weight: 0\.3 needs"),
    ],
)
def test_where_there_is_no_such_head_the_key_is_refused(recipe, overrides, words):
    with pytest.raises(RecipeError, match=words):
        load(recipe, overrides)


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(pipeline=2)])
def test_layouts_that_split_the_encoder_are_refused(layout):
    recipe = load("whisper-micro", ["training.ctc_weight=0.3"])
    with pytest.raises(RecipeError, match=r"training\.ctc_weight: .* Set it to 0"):
        refuse_conflicts(recipe, layout)
    refuse_conflicts(recipe, Layout(shard=2))


@pytest.mark.guides
def test_the_plan_counts_the_head(task):
    from muster.planner.shards import stages
    from plan.subjects import subject

    plain, joint = (
        stages(subject("whisper-micro", *SMALL, f"training.ctc_weight={weight}"), Layout())[0]
        for weight in (0, WEIGHT)
    )
    assert joint.numel - plain.numel == 17 * (task.tokens.end + 1)


def resumed(mesh, folder: str) -> tuple[list[float], list[float], bool]:
    """Three steps in one go, and one more after two of another run."""
    from pathlib import Path

    from training import make_job, run_training

    options = [*SMALL, "training.ctc_weight=0.3", "training.schedule=constant"]
    options += ["training.steps=3", "evaluation.final=false", "training.warmup_steps=1"]
    straight = run_training(mesh, f"{folder}/a", [*options, "checkpoint.every_steps=2"], WHISPER)
    saved = f"{folder}/a/checkpoints/step-2"
    again = run_training(mesh, f"{folder}/b", [*options, f"checkpoint.resume={saved}"], WHISPER)
    try:
        other = [*options, f"checkpoint.resume={saved}", "training.ctc_weight=0.4"]
        make_job(mesh, f"{folder}/c", other, WHISPER)
    except CheckpointError:
        refused = True
    else:
        refused = False
    assert Path(saved).is_dir()
    return [[line["loss"] for line in lines] for lines in (straight, again)] + [refused]


WHISPER = "whisper-micro"


def test_a_checkpoint_holds_the_head(ranks, tmp_path):
    straight, again, refused = ranks(1)(resumed, str(tmp_path))[0]
    assert len(straight) == 3
    assert again == straight[2:], "bit for bit"
    assert refused, "another weight is another loss"


def test_decoding_asks_the_head_unless_told_otherwise(task, model):
    batch = task.prepare(task.collate(CLIPS, None))
    assert task.eval_inputs(batch, bool).args[2].ctc_weight == 0.4
    said = {}
    for weight in (0.0, 0.9):
        asked = task_of(
            *SMALL, f"training.ctc_weight={WEIGHT}", f"evaluation.ctc_weight={weight}",
            "evaluation.max_tokens=8",
        )  # fmt: skip
        with torch.no_grad():
            inputs = asked.eval_inputs(batch, bool)
            said[inputs.args[2].ctc_weight] = model(*inputs.args).tolist()
    assert said[0.0] != said[0.9]
    plain = task_of(*SMALL)
    assert (
        plain.eval_inputs(plain.prepare(plain.collate(CLIPS, None)), bool).args[2].ctc_weight == 0
    )
