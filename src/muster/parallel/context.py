"""Context parallelism: each rank computes some tokens of every sequence.

With N ranks a sequence is cut into 2N chunks and rank i holds chunks i and 2N − 1 − i, so that causal
attention costs every rank the same. Everything but attention works on single tokens. For attention the
ranks gather each other's keys and values, and each computes the attention of its own queries; in the
backward pass the gradients of keys and values are summed and scattered back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.data.loader import Batch
from muster.models.attention import Attention
from muster.models.configs import DecoderConfig
from muster.models.gpu_kernels import for_gpu
from muster.models.varlen import Documents
from muster.parallel.layout import Layout

PER_TOKEN = ("tokens", "targets", "positions")  # of a batch; [batch, time]


@dataclass(frozen=True)
class SequenceShare:
    """Which two of the 2 × `ranks` chunks of a sequence a rank has."""

    rank: int
    ranks: int

    @property
    def chunks(self) -> tuple[int, int]:
        return self.rank, 2 * self.ranks - 1 - self.rank

    def of(self, tensor: Tensor, dim: int = 1) -> Tensor:
        parts = tensor.chunk(2 * self.ranks, dim)
        return torch.cat([parts[chunk] for chunk in self.chunks], dim)


def share(batch: Batch, layout: Layout, rank: int) -> Batch:
    """This rank's tokens of a batch. `documents` stay whole, as keys do."""
    if layout.context == 1:
        return batch
    part = SequenceShare(layout.context_rank(rank), layout.context)
    tensors = dict(batch.tensors)
    if "positions" not in tensors:  # [1, time]: the same in all rows
        tokens = tensors["tokens"]
        tensors["positions"] = torch.arange(tokens.shape[1], device=tokens.device)[None]
    cut = {name: part.of(tensors[name]) for name in PER_TOKEN if name in tensors}
    return replace(batch, tensors=tensors | cut, part=part.rank)


def split(model: nn.Module, layout: Layout, rank: int, group: Any) -> None:
    """In place: every attention layer gathers keys and values from the other ranks of `group`."""
    part = SequenceShare(layout.context_rank(rank), layout.context)
    attend = ContextAttention(part, group.group_name)
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention layer that could be shared")
    for layer in layers:
        layer.attend = attend  # type: ignore[method-assign,assignment]


@dataclass(frozen=True)
class ContextAttention:
    """Replaces `Attention.attend`."""

    part: SequenceShare
    group: str  # name of the process group

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents | None,
        past: int,
        config: DecoderConfig,
        dropout: float,
    ) -> Tensor:
        """q, k and v are this rank's; `documents` are those of whole sequences."""
        numbers = documents[0] if documents else None
        k, v = self._whole(torch.stack([k, v])).unbind()
        mixed = [
            _attend(own, k, v, chunk * own.shape[2], numbers, config, dropout)
            for own, chunk in zip(q.chunk(2, 2), self.part.chunks, strict=True)
        ]
        return torch.cat(mixed, 2)

    def _whole(self, own: Tensor) -> Tensor:
        """[…, time / ranks, size] of every rank, as [2, batch, heads, time, size] in order."""
        ranks = self.part.ranks
        gathered = _AllGather.apply(own, ranks, self.group).unflatten(0, (ranks, len(own)))
        heads, tails = gathered.chunk(2, -2)
        ordered = torch.cat([heads, tails.flip(0)])
        return ordered.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)


class _AllGather(torch.autograd.Function):
    """Along the first dimension; gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: int, group: str) -> Tensor:
        ctx.ranks, ctx.group = ranks, group
        ops = torch.ops._c10d_functional
        gathered = ops.all_gather_into_tensor(own.contiguous(), ranks, group)
        return ops.wait_tensor(gathered)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ops = torch.ops._c10d_functional
        (whole,) = gradients
        own = ops.reduce_scatter_tensor(whole.contiguous(), "sum", ctx.ranks, ctx.group)
        return ops.wait_tensor(own), None, None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begin: int,
    documents: Tensor | None,
    config: DecoderConfig,
    dropout: float,
) -> Tensor:
    """Of queries that begin at position `begin`, to the keys that they may see."""
    end = begin + q.shape[2]
    first = 0 if config.window is None else max(0, begin - config.window + 1)
    k, v = k[:, :, first:end], v[:, :, first:end]
    windowed = config.window is not None and end > config.window
    mask: Any = None
    causal = first == begin and documents is None and not windowed
    if documents is not None or windowed:
        mask = _mask(config, begin, first, end, documents, q.device)
    elif not causal and q.device.type != "cpu":
        from torch.nn.attention.bias import causal_lower_right  # takes a second

        mask = causal_lower_right(q.shape[2], k.shape[2])
    elif not causal and not for_gpu(q):  # the planner's tensors need no mask, as on a GPU
        mask = _mask(config, begin, first, end, None, q.device)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        enable_gqa=config.kv_heads != config.heads,
    )


def _mask(
    config: DecoderConfig,
    begin: int,
    first: int,
    end: int,
    documents: Tensor | None,
    device: torch.device,
) -> Tensor:
    """True where queries `begin` … may attend to keys `first` …, both up to `end`."""
    query = torch.arange(begin, end, device=device)[:, None]
    key = torch.arange(first, end, device=device)
    mask = key <= query
    if config.window is not None:
        mask = mask & (key > query - config.window)
    if documents is not None:
        same = documents[:, begin:end, None] == documents[:, None, first:end]
        return (mask & same)[:, None]
    return mask
