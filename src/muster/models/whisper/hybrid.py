"""Whisper with a CTC head on its encoder, for training (hybrid CTC/attention; Watanabe et al. 2017).

The head is a linear layer over the tokens of text and a blank, the last symbol. Whisper's own parameters
keep their names; those of the head begin with `HEAD`, and no export holds them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from muster.models.configs import WhisperConfig
from muster.models.weights import Region, Weights
from muster.models.whisper.joint import CTCPrefixes, JointDecoder
from muster.models.whisper.model import CachedWhisper, FreshWhisper, Whisper
from muster.models.whisper.search import CachedDecoder, Search, generate

HEAD = "ctc_head."


class HybridWhisper(Whisper):
    """Without a `search`, the decoder's logits and those of the head, `[batch, frames / 2, text + 1]`; `text`
    tokens are text, the first ones of the vocabulary."""

    def __init__(self, config: WhisperConfig, text: int, freeze_encoder: bool = False) -> None:
        super().__init__(config, freeze_encoder)
        self.ctc_head = nn.Linear(config.width, text + 1)

    def forward(  # type: ignore[override]
        self, features: Tensor, tokens: Tensor, search: Search | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        encoded = self.encode(features)
        if search is None:
            return self.proj_out(self.model["decoder"](tokens, encoded)), self.ctc_head(encoded)
        decoder: CachedDecoder = CachedWhisper(self, encoded)
        if search.ctc_weight:
            prefixes = CTCPrefixes(self.ctc_head(encoded))
            decoder = JointDecoder(decoder, prefixes, search.ctc_weight)
        return generate(search, tokens, decoder, self.config.target_positions)


class HeadWeights:
    """The base's weights, and a fresh head's."""

    def __init__(self, base: Weights, seed: int) -> None:
        self.base, self.fresh = base, FreshWhisper(seed)

    def read(
        self, name: str, shape: tuple[int, ...], region: Region, device: torch.device
    ) -> Tensor:
        source = self.fresh if name.startswith(HEAD) else self.base
        return source.read(name, shape, region, device)


def without_head(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if not name.startswith(HEAD)}
