"""What a forward pass changes in the model itself: running statistics, of which a step that makes no update
leaves none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from muster.parallel.optimizers.base import local


class Buffers:
    """The buffers of a model, and how they were."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        found: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for part in parts:
            for buffer in part.buffers():
                found[buffer.dtype].append(local(buffer))
        self._of_a_kind = list(found.values())
        self._before: list[Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        """How they are now."""
        self._before = [_flat(buffers) for buffers in self._of_a_kind]

    @torch.no_grad()
    def restore(self, unless: Tensor | None = None) -> None:
        """As they were kept; where `unless`, a boolean on the device, is true, they stay."""
        for buffers, before in zip(self._of_a_kind, self._before, strict=True):
            flat = before if unless is None else torch.where(unless, _flat(buffers), before)
            pieces = flat.split([buffer.numel() for buffer in buffers])
            shaped = [piece.view_as(b) for piece, b in zip(pieces, buffers, strict=True)]
            torch._foreach_copy_(buffers, shaped)


def _flat(buffers: Sequence[Tensor]) -> Tensor:
    return torch.cat([buffer.flatten() for buffer in buffers])
