"""Using a checkpoint in one process: scoring a split, transcribing files or a live pipe."""

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

from muster.data import audio
from muster.data.corpus import Split
from muster.data.features import StreamingLogMel
from muster.data.speech import SpeechSample
from muster.errors import MusterError
from muster.parallel.layout import Layout
from muster.parallel.mesh import Mesh
from muster.recipe.schema import Recipe
from muster.tasks import build_task
from muster.tasks.base import Task
from muster.tasks.speech_ctc import SpeechCTC
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
class Recogniser(Trained):
    """One that turns audio into text."""

    task: SpeechCTC


def load_trained(checkpoint: Path, evaluation: dict[str, object] | None = None) -> Trained:
    """From a run directory (its newest complete checkpoint) or one `step-<n>` folder.

    `evaluation` replaces keys of the recipe's section of that name.
    """
    if not checkpoint.exists():
        raise MusterError(f"no checkpoint at {checkpoint}")
    saved = open_checkpoint(checkpoint)
    document = json.loads((saved.path / "recipe.json").read_text())
    document["evaluation"] |= evaluation or {}
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


def load_recogniser(checkpoint: Path, evaluation: dict[str, object] | None = None) -> Recogniser:
    found = load_trained(checkpoint, evaluation)
    if not isinstance(found.task, SpeechCTC):
        raise MusterError(
            f"{found.saved.path} is of task {found.recipe.task}; transcribing needs speech-ctc"
        )
    return Recogniser(found.task, found.model, found.device, found.saved, found.recipe)


@torch.no_grad()
def transcribe(recogniser: Recogniser, files: list[Path]) -> Iterator[tuple[Path, str]]:
    """Each file's text, in the order given; batched by length inside."""
    task, rate = recogniser.task, recogniser.task.recipe.data.sample_rate
    clips = []
    for path in files:
        if not path.is_file():
            raise MusterError(f"{path}: no such file")
        try:
            clips.append(audio.decode(path, rate))
        except MusterError as error:
            raise MusterError(f"{path}: {error}") from None
        if not len(clips[-1]):
            raise MusterError(f"{path}: the clip has zero length")
    order = sorted(range(len(files)), key=lambda i: len(clips[i]))
    texts: dict[int, str] = {}
    for start in range(0, len(order), BATCH):
        part = order[start : start + BATCH]
        batch = task.collate([SpeechSample(i, clips[i], "") for i in part], None)
        batch = task.prepare(batch.to(recogniser.device))
        texts.update(
            zip(
                part,
                task.decode(*recogniser.model(batch["features"], batch["frames"])),
                strict=True,
            )
        )
    for i, path in enumerate(files):
        yield path, texts[i]


@torch.no_grad()
def stream(recogniser: Recogniser, pipe: BinaryIO) -> Iterator[str]:
    """Text as it is heard, from raw 16-bit little-endian mono samples at the recipe's rate.

    Concatenated, the pieces are what `transcribe` gives for the same audio: the model advances its
    recurrent state frame by frame, and greedy CTC needs only the last symbol.
    """
    task, model = recogniser.task, recogniser.model
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


def score(trained: Trained, split: Split | None = None) -> Evaluation:
    """The score of a split of the checkpoint's own data, in this one process.

    By default the test data, else validation.
    """
    mesh = Mesh(0, 0, Layout(), trained.device, None)
    asked = trained.recipe.evaluation.batch_size
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
    if trained.recipe.task == "speech-ctc":
        cure = f"`muster data make FOLDER {trained.recipe.data.train} --split {splits[0]}` adds one"
    raise MusterError(f"{trained.recipe.data.train} has no {' or '.join(splits)} split; {cure}")
