"""Whisper's search for tokens where the layers are stages of a pipeline.

The last stage broadcasts its logits, so that all ranks of the pipeline make the same search: each knows
the next tokens, and each stage keeps the keys and values of its own layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from muster.models.whisper.model import WhisperCache, WhisperPart, next_logits
from muster.models.whisper.search import Search, generate

if TYPE_CHECKING:
    from muster.parallel.pipeline import PipelineEngine


def staged_search(
    engine: PipelineEngine, features: Tensor, prompt: Tensor, search: Search
) -> Tensor:
    """New tokens [batch, new], on every rank of the pipeline."""
    decoder = _StagedDecoder(engine, features)
    return generate(search, prompt, decoder, decoder.config.target_positions)


class _StagedDecoder:
    """A `CachedDecoder`."""

    def __init__(self, engine: PipelineEngine, features: Tensor) -> None:
        part = engine.parts[0]
        assert isinstance(part, WhisperPart)
        self.engine, self.config, self.cache = engine, part.config, WhisperCache()
        last = engine.stage_of(self.config.encoder_layers - 1)
        shape = (len(features), features.shape[1] // 2)
        x = engine.run_stages(range(last + 1), features, shape, {})
        self.encoded = self._broadcast(x, last, (*shape, engine.width))

    def next(self, tokens: Tensor) -> Tensor:
        """Logits [rows, vocab], float32, of what follows `tokens` [rows, time] and all before."""
        engine, shape = self.engine, (tokens.shape[0], tokens.shape[1])
        first, last = engine.stage_of(self.config.encoder_layers), engine.stages - 1
        shared = {"encoded": self.encoded, "tokens": tokens, "cache": self.cache}
        x = engine.run_stages(range(first, last + 1), tokens, shape, shared)
        if last % engine.ranks == engine.rank:
            x = next_logits(x, self.config.vocab)
        return self._broadcast(x, last, (len(tokens), self.config.vocab))

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)

    def _broadcast(self, x: Tensor, stage: int, shape: tuple[int, ...]) -> Tensor:
        """From the rank that holds `stage`, in float32."""
        engine, owner = self.engine, stage % self.engine.ranks
        if owner == engine.rank:
            x = x.float().contiguous()
        else:
            x = torch.empty(shape, device=engine.mesh.device)
        dist.broadcast(x, group=engine.group, group_src=owner)
        return x
