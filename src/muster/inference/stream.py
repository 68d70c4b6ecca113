"""Transcribing a live pipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import torch

from muster.data.speech.features import StreamingLogMel
from muster.errors import MusterError
from muster.inference.load import Recogniser
from muster.tasks.speech_ctc import SpeechCTC

CHUNK_S = 0.1


@torch.no_grad()
def stream(recogniser: Recogniser, pipe: BinaryIO) -> Iterator[str]:
    """Text as audio arrives, from raw 16-bit little-endian mono samples at the recipe's rate.

    Concatenated, the pieces are what `transcribe` gives for the same audio: the model advances its
    recurrent state frame by frame, and greedy CTC needs only the last symbol.
    """
    task, model = recogniser.task, recogniser.model
    if not isinstance(task, SpeechCTC):
        raise MusterError(
            "Whisper needs whole windows, so it cannot transcribe a stream; train a causal preset of "
            "speech-ctc (muster train speech-streaming)"
        )
    if not getattr(getattr(model, "config", None), "causal", False):
        raise MusterError(
            f"{task.recipe.model.title} looks ahead, so it cannot transcribe a stream; train a causal preset "
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
