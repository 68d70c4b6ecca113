"""Using a checkpoint in one process: loading it, scoring a split, transcribing a live pipe."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import nn

from muster.data.corpus import Split
from muster.data.features import StreamingLogMel
from muster.data.windows import LONGEST, TICKS_PER_SECOND
from muster.errors import MusterError, RecipeError
from muster.models import whisper_folder
from muster.parallel.layout import Layout
from muster.parallel.materialise import materialise
from muster.parallel.mesh import Mesh
from muster.recipe.schema import Recipe
from muster.tasks import build_task
from muster.tasks.base import Task
from muster.tasks.speech_ctc import SpeechCTC
from muster.tasks.speech_seq2seq import SpeechSeq2Seq
from muster.train.checkpoint import Saved, load_model, open_checkpoint
from muster.train.evaluate import Alone, Evaluation, evaluate

CHUNK_S = 0.1
BATCH = 16


@dataclass(frozen=True)
class Trained:
    """A trained model of any task, ready for use."""

    task: Task
    model: nn.Module
    device: torch.device
    saved: Saved
    recipe: Recipe


@dataclass(frozen=True)
class Recogniser:
    """A model that turns audio into text."""

    task: SpeechCTC | SpeechSeq2Seq
    model: nn.Module
    device: torch.device
    longest: float = LONGEST  # seconds that it hears at a time
    timed: bool = False  # it also writes down when things are said

    @property
    def rate(self) -> int:
        return self.task.recipe.data.sample_rate


def load_trained(
    checkpoint: Path,
    evaluation: dict[str, object] | None = None,
    data: dict[str, object] | None = None,
) -> Trained:
    """From a run directory (its newest complete checkpoint) or one `step-<n>` folder.

    `evaluation` and `data` replace keys of the recipe's sections of those names.
    """
    if not checkpoint.exists():
        raise MusterError(f"no checkpoint at {checkpoint}")
    saved = open_checkpoint(checkpoint)
    document = json.loads((saved.path / "recipe.json").read_text())
    document["evaluation"] |= evaluation or {}
    document["data"] |= data or {}
    try:
        recipe = Recipe.model_validate(document)
    except ValueError as error:
        raise MusterError(f"{saved.path}: its recipe does not fit this muster ({error})") from None
    task = build_task(recipe, json.loads((saved.path / "assets.json").read_text()))
    model = task.build_model()
    with warnings.catch_warnings():  # torch remarks that one process loads alone, as it should
        warnings.simplefilter("ignore", UserWarning)
        load_model(saved, model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Trained(task, model.to(device).eval(), device, saved, recipe)


def load_recogniser(
    checkpoint: Path,
    evaluation: dict[str, object] | None = None,
    *,
    language: str | None = None,
    timestamps: bool | None = None,
) -> Recogniser:
    """From a speech task's checkpoint or a Hugging Face folder of Whisper's.

    `language` replaces data.language. `timestamps`: whether Whisper is asked for times; by default
    where it learned to tell them, as OpenAI's models did.
    """
    if is_folder(checkpoint):
        return load_folder(checkpoint, evaluation, language=language, timestamps=timestamps)
    found = load_trained(checkpoint, evaluation, {"language": language} if language else {})
    task, where = found.task, found.saved.path
    if isinstance(task, SpeechCTC):
        if timestamps:
            raise MusterError(
                f"{where} is of task speech-ctc, which tells no times; leave them out"
            )
        return Recogniser(task, found.model, found.device)
    if not isinstance(task, SpeechSeq2Seq):
        raise MusterError(
            f"{where} is of task {found.recipe.task}; transcribing needs speech-ctc or speech-seq2seq"
        )
    timed = found.recipe.data.timestamps if timestamps is None else timestamps
    # Without times it hears no more than it was trained on: the last bucket is the encoder's all.
    longest = LONGEST if timed else task.buckets[-2:][0]
    longest = min(longest, float(task.windows(np.array([longest]), training=False)[0]))
    return Recogniser(task, found.model, found.device, longest, timed)


def is_folder(checkpoint: Path) -> bool:
    """Whether this is a Hugging Face folder, and no run of muster's."""
    return (checkpoint / "config.json").is_file()


def load_folder(
    folder: Path,
    evaluation: dict[str, object] | None = None,
    data: dict[str, object] | None = None,
    *,
    language: str | None = None,
    timestamps: bool | None = None,
) -> Recogniser:
    """A pretrained Whisper as it is."""
    try:
        positions = whisper_folder.read_config(folder).source_positions
        window = min(LONGEST, positions / TICKS_PER_SECOND)
        recipe = Recipe.model_validate(
            {
                "task": "speech-seq2seq",
                "model": {"pretrained": str(folder)},
                "data": {"language": language, "window": window, **(data or {})},
                "training": {"steps": 1},
                "evaluation": evaluation or {},
            }
        )
        task = SpeechSeq2Seq(recipe)
        weights = task.weights()
    except RecipeError as error:
        words = str(error).removeprefix("model.pretrained: ")
        raise MusterError(words.replace("data.language", "--language")) from None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device("meta"):
        model = task.build_model()
    materialise(model, weights, device)
    timed = bool(task.tokens.languages) if timestamps is None else timestamps
    return Recogniser(task, model.eval(), device, window, timed)


@torch.no_grad()
def stream(recogniser: Recogniser, pipe: BinaryIO) -> Iterator[str]:
    """Text as it is heard, from raw 16-bit little-endian mono samples at the recipe's rate.

    Concatenated, the pieces are what `transcribe` gives for the same audio: the model advances its
    recurrent state frame by frame, and greedy CTC needs only the last symbol.
    """
    task, model = recogniser.task, recogniser.model
    if not isinstance(task, SpeechCTC):
        raise MusterError(
            "Whisper hears whole windows, so it cannot transcribe a stream; train a causal preset of "
            "speech-ctc (muster train speech-streaming)"
        )
    preset = task.recipe.model.preset
    if not getattr(getattr(model, "config", None), "causal", False):
        raise MusterError(
            f"model.preset {preset} looks ahead, so it cannot transcribe a stream; train a causal preset "
            "(lmu-micro-causal, lmu-7m-causal) with data.normalize=fixed"
        )
    if task.recipe.data.normalize != "fixed":
        raise MusterError(
            "this checkpoint was trained with data.normalize=clip, which needs whole clips; streaming needs fixed"
        )
    features = StreamingLogMel(task.logmel.cpu())
    state = model.stream_state(1)  # type: ignore[operator]
    said: list[int] = []
    text, previous = "", 0
    chunk_bytes = 2 * round(CHUNK_S * task.recipe.data.sample_rate)
    last = False
    while not last:
        raw = pipe.read(chunk_bytes)
        last = len(raw) < chunk_bytes
        samples = torch.from_numpy(
            np.frombuffer(raw[: len(raw) // 2 * 2], "<i2").astype(np.float32) / 32768
        )
        frames = features.push(samples, last)[None].to(recogniser.device)
        logits, state = model.stream(frames, state, last=last)  # type: ignore[operator]
        best = logits[0].argmax(-1).tolist()
        for symbol in best:
            if symbol != 0 and symbol != previous:
                said.append(symbol)
            previous = symbol
        now = task.vocabulary.decode(said)
        if now != text:
            yield now[len(text) :]
            text = now


def score(trained: Trained | Recogniser, split: Split | None = None) -> Evaluation:
    """The score of a split of the recipe's data, in this one process.

    By default the test data, else validation.
    """
    mesh, recipe = Mesh(0, 0, Layout(), trained.device, None), trained.task.recipe
    asked = recipe.evaluation.batch_size
    splits: tuple[Split, ...] = (split,) if split else ("test", "validation")
    for wanted in splits:
        result = evaluate(
            trained.task,
            Alone(trained.model),
            wanted,
            mesh,
            asked if isinstance(asked, int) else BATCH,
            nullcontext,
        )
        if result is not None:
            return result
    cure = "name some as data.test or data.validation in the recipe"
    if recipe.task.startswith("speech-"):
        cure = f"`muster data make FOLDER {recipe.data.train} --split {splits[0]}` adds one"
    raise MusterError(f"{recipe.data.train} has no {' or '.join(splits)} split; {cure}")
