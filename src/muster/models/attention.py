"""Attention of the decoder families: rotary positions, grouped queries, masks, the cache."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.models import varlen
from muster.models.configs import DecoderConfig
from muster.models.norm import RMSNorm
from muster.models.varlen import Documents


class Cache:
    """Keys and values of the tokens seen so far, one pair per layer, `[batch, heads, time, size]`."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        return max((self.seen(layer) for layer in self.layers), default=0)

    def seen(self, layer: int) -> int:
        return self.layers[layer][0].shape[2] if layer in self.layers else 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.layers:
            before = self.layers[layer]
            k, v = torch.cat([before[0], k], 2), torch.cat([before[1], v], 2)
        self.layers[layer] = (k, v)
        return k, v


Rotary = tuple[Tensor, Tensor]  # cos and sin of each position


def rotations(config: DecoderConfig, positions: Tensor) -> Rotary:
    """cos and sin of every position's turn, `[…, 1, time, head_size / 2]`, always in float32."""
    exponent = torch.arange(0, config.head_size, 2, device=positions.device) / config.head_size
    frequency = 1.0 / config.rope_theta ** exponent.float()
    if (scaling := config.rope_scaling) is not None:
        turns = scaling.original_positions * frequency / (2 * math.pi)
        keep = (turns - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        keep = keep.clamp(0, 1)
        frequency = frequency * (keep + (1 - keep) / scaling.factor)
    angle = positions.float()[..., None] * frequency
    return angle.cos().unsqueeze(-3), angle.sin().unsqueeze(-3)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_size / 2) of x `[batch, heads, time, head_size]`."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        size, kv = config.heads * config.head_size, config.kv_heads * config.head_size
        self.q = nn.Linear(config.width, size, bias=config.qkv_bias)
        self.k = nn.Linear(config.width, kv, bias=config.qkv_bias)
        self.v = nn.Linear(config.width, kv, bias=config.qkv_bias)
        self.o = nn.Linear(size, config.width, bias=config.bias)
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_size, eps=config.eps) if config.qk_norm else None for _ in "qk"
        )

    def forward(
        self, x: Tensor, rotary: Rotary | None, documents: Documents | None, cache: Cache | None
    ) -> Tensor:
        """x [batch, time, width]. Heads and time are read off the projections: a rank may hold some
        of the heads, and between layers only a shard of the sequence."""
        q, k, v = (self._heads(project(x)) for project in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        past = cache.seen(self.layer) if cache is not None else 0
        if rotary is not None:
            cos, sin = (table[..., : q.shape[2], :] for table in rotary)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        dropout = self.config.dropout if self.training else 0.0
        mixed = self.attend(q, k, v, documents, past, self.config, dropout)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_size)).transpose(1, 2)

    @staticmethod
    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents | None,
        past: int,
        config: DecoderConfig,
        dropout: float,
    ) -> Tensor:
        """Causal attention of `[batch, heads, time, size]`; an instance may replace it."""
        numbers, edges = documents or (None, None)
        if edges is not None and varlen.applies(q, documents, past, dropout):
            return varlen.attend(q, k, v, edges, config.window)
        mask = attention_mask(config, q.shape[2], past, numbers, q.device)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None and q.shape[2] > 1,
            enable_gqa=config.kv_heads != config.heads,
        )


def attention_mask(
    config: DecoderConfig, time: int, past: int, documents: Tensor | None, device: torch.device
) -> Tensor | None:
    """True where a token may attend; None for the plain causal mask, which has a faster kernel."""
    windowed = config.window is not None and past + time > config.window
    if documents is None and not windowed and (past == 0 or time == 1):
        return None
    query = torch.arange(past, past + time, device=device)[:, None]
    key = torch.arange(past + time, device=device)
    mask = key <= query
    if config.window is not None:
        mask = mask & (key > query - config.window)
    if documents is not None:
        return (mask & (documents[:, :, None] == documents[:, None, :]))[:, None]
    return mask
