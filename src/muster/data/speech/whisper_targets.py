"""Decoder inputs and targets of Whisper."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from muster.data.loader import IGNORE


def pair(
    prompt: list[int],
    texts: Sequence[list[int]],
    end: int,
    max_tokens: int | None = None,
    broken: Sequence[bool] = (),
) -> tuple[Tensor, Tensor]:
    """Decoder inputs (prompt and text) and targets (text and end), both `[rows, time]`.

    Targets of the prompt are ignored. A text of more than `max_tokens` tokens is truncated and has no
    end token. All targets of `broken` rows are ignored.
    """
    shown = [text[:max_tokens] for text in texts]
    size = len(prompt) + max(map(len, shown))
    tokens = torch.full((len(texts), size), end)
    targets = torch.full((len(texts), size), IGNORE)
    begin = len(prompt) - 1
    for row, (text, kept) in enumerate(zip(texts, shown, strict=True)):
        tokens[row, : len(prompt) + len(kept)] = torch.tensor(prompt + kept)
        if broken and broken[row]:
            continue
        wanted = kept if len(kept) < len(text) else [*kept, end]
        targets[row, begin : begin + len(wanted)] = torch.tensor(wanted)
    return tokens, targets
