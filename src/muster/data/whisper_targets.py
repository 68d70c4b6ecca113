"""What Whisper's decoder reads and what it learns to write."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from muster.data.loader import IGNORE


def pair(
    prompt: list[int],
    texts: Sequence[list[int]],
    end: int,
    room: int | None = None,
    broken: Sequence[bool] = (),
) -> tuple[Tensor, Tensor]:
    """Tokens to read, prompt and text, and targets, text and end: `[rows, time]` both.

    The prompt itself is not learnt. A text of more than `room` tokens is cut there, and is not
    taught to end. `broken` rows teach nothing.
    """
    shown = [text[:room] for text in texts]
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
