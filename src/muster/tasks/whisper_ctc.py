"""A CTC head on Whisper's encoder beside its decoder: what `training.ctc_weight` adds to the task."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from muster.data.loader import Batch
from muster.data.speech import windows
from muster.data.speech.source import SpeechSource
from muster.data.speech.whisper_text import WhisperTokens
from muster.recipe.schema import Recipe
from muster.tasks.ctc import ctc_targets, frames_needed, summed_ctc_loss

JOINT_WEIGHT = 0.4  # of the head in decoding
TARGETS = ("ctc_targets", "ctc_target_lengths")


def target_tensors(targets: Tensor, is_text: Callable[[int], bool]) -> dict[str, Tensor]:
    """Of the decoder's targets `[batch, time]` those that are of text, for a batch."""
    symbols = [[target for target in row if is_text(target)] for row in targets.tolist()]
    return dict(zip(TARGETS, ctc_targets(symbols), strict=True))


def taken(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The head's targets in a batch; none where there is no head."""
    return {name: tensors[name] for name in TARGETS if name in tensors}


def joint_loss(loss: Tensor, logits: Tensor, batch: Batch, weight: float, blank: int) -> Tensor:
    """The decoder's loss and the head's, of all frames of the window: the head learns that padding is blank,
    as every layer sees it."""
    lengths = torch.full((len(logits),), logits.shape[1])
    targets = batch["ctc_targets"], batch["ctc_target_lengths"]
    ctc = summed_ctc_loss(logits, lengths, targets, blank=blank)
    return (1 - weight) * loss + weight * ctc


def decoding_weight(recipe: Recipe, *, timestamps: bool) -> float:
    """Of the head in the search; without one, and for timestamps, which it does not know, 0."""
    asked = recipe.evaluation.ctc_weight
    if not recipe.training.ctc_weight or timestamps:
        return 0.0
    return JOINT_WEIGHT if asked == "auto" else asked


def keep_long_enough(source: SpeechSource, tokens: WhisperTokens, limit: int) -> None:
    """Clips that are too short for CTC are left out. `limit`: the tokens of a text that are trained on."""
    encoded = tokens.encode_all(source.texts, timestamps=False)
    needed = [frames_needed(ids[:limit]) for ids in encoded]
    frames = np.ceil(source.lengths * windows.TICKS_PER_SECOND)
    source.keep(
        [want <= have for want, have in zip(needed, frames, strict=True)],
        "the transcript has more tokens than the encoder has frames for the clip (training.ctc_weight)",
    )
