"""One decoder for two families of language models.

GPT-2: learned positions, LayerNorm, GELU, biases, a head tied to the embedding. Llama and its
relatives (Mistral, Qwen2, Qwen3): rotary positions, RMSNorm, SwiGLU, grouped-query attention.

A decoder can be built in part (`Part`): some layers, the embedding if they begin at the first, the
head if they end at the last. Parameters keep the names they have in the whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.models.attention import Attention, Cache, Rotary, rotations
from muster.models.configs import DecoderConfig
from muster.models.gpu_kernels import for_gpu, residual_stream
from muster.models.norm import LayerNorm, RMSNorm
from muster.models.plan import ParallelPlan, Split
from muster.models.varlen import Documents, documents_of


@dataclass(frozen=True)
class Part:
    """Layers `start` … `stop - 1` of `layers`."""

    start: int
    stop: int
    layers: int

    @property
    def first(self) -> bool:
        return self.start == 0

    @property
    def last(self) -> bool:
        return self.stop == self.layers


class FeedForward(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = (
            nn.Linear(config.width, config.hidden, bias=config.bias)
            if config.activation == "swiglu"
            else None
        )
        self.up = nn.Linear(config.width, config.hidden, bias=config.bias)
        self.down = nn.Linear(config.hidden, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(F.gelu(self.up(x), approximate="tanh"))


def make_norm(config: DecoderConfig) -> nn.Module:
    if config.norm == "rms":
        return RMSNorm(config.width, eps=config.eps)
    return LayerNorm(config.width, eps=config.eps)


class DecoderBlock(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, layer)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = FeedForward(config)
        self.dropout = config.dropout

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None = None,
        documents: Documents | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        x = x + self._drop(self.attention(self.attention_norm(x), rotary, documents, cache))
        return x + self._drop(self.feed_forward(self.feed_forward_norm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Embedding(nn.Module):
    """Token and, for GPT-2, position embeddings."""

    def __init__(self, config: DecoderConfig, first: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = (
            nn.Embedding(config.positions, config.width)
            if config.position == "learned" and first
            else None
        )

    def forward(self, tokens: Tensor, positions: Tensor | None, past: int) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is None:
            return x
        if positions is None:
            positions = torch.arange(past, past + tokens.shape[1], device=tokens.device)
        return x + self.positions(positions)


ALIGNED = 64  # multiple of matrix rows for fast GPU kernels


def project(x: Tensor, weight: Tensor) -> Tensor:
    """Logits. An odd vocabulary size (GPT-2's 50257) makes GPU kernels several times slower, so the matrix
    is padded there: columns beyond the vocabulary are to be ignored."""
    missing = -weight.shape[0] % ALIGNED
    split = hasattr(weight, "device_mesh")  # a DTensor; importing that takes a second
    if missing and for_gpu(x) and not split:
        weight = F.pad(weight, (0, 0, 0, missing))
    return F.linear(x, weight)


class Head(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.weight)


class TiedHead(nn.Module):
    """Logits from the embedding's own weight, which stays the embedding's parameter alone."""

    def __init__(self, tokens: nn.Embedding) -> None:
        super().__init__()
        self._tokens = (tokens,)  # in a tuple, so that it is not registered a second time

    def borrows(self) -> tuple[Tensor, ...]:
        """Parameters that `forward` uses and another module owns."""
        return (self._tokens[0].weight,)

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self._tokens[0].weight)


class Decoder(nn.Module):
    """Tokens `[batch, time]` to logits `[batch, time, vocab or more]`, see `project`; a middle part,
    states to states."""

    def __init__(self, config: DecoderConfig, part: Part | None = None) -> None:
        super().__init__()
        self.config, self.part = config, part or Part(0, config.layers, config.layers)
        first, last = self.part.first, self.part.last
        self.embed = Embedding(config, first) if first or (last and config.tied) else None
        layers = range(self.part.start, self.part.stop)
        self.blocks = nn.ModuleDict({str(i): DecoderBlock(config, i) for i in layers})
        self.norm = make_norm(config) if last else None
        self.head: nn.Module | None = None
        if last and config.tied:
            assert self.embed is not None
            self.head = TiedHead(self.embed.tokens)
        elif last:
            self.head = Head(config.width, config.vocab, bias=False)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """`positions` [batch, time] replace 0, 1, 2 …; tokens of different `documents`
        [batch, time] do not see each other. `starts` [batch, count], where documents begin, lets a
        faster kernel see to that."""
        past = cache.length if cache is not None else 0
        rotary = self._rotary(x, positions, past)
        if self.part.first:
            assert self.embed is not None
            x = self.embed(x, positions, past)
        x, apart = residual_stream(x), documents_of(documents, starts)
        for block in self.blocks.values():
            x = block(x, rotary, apart, cache)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x

    def _rotary(self, x: Tensor, positions: Tensor | None, past: int) -> Rotary | None:
        """The tables for all blocks. States between the stages of a pipeline may be a shard of the sequence:
        there they are for all positions, and each block takes the first of them."""
        if self.config.position != "rotary":
            return None
        if positions is None:
            stop = past + x.shape[1] if self.part.first else self.config.positions
            positions = torch.arange(past, stop, device=x.device)
        return rotations(self.config, positions)

    @property
    def plan(self) -> ParallelPlan:
        config, layer = self.config, layer_cost(self.config)
        return ParallelPlan(
            blocks=(DecoderBlock.__name__,),
            tensor=tensor_plan(config),
            costs=(*[layer] * (config.layers - 1), layer + config.vocab * config.width),
            heads=config.heads,
            kv_heads=config.kv_heads,
            vocab=config.vocab,
            hidden=config.hidden,
            width=config.width,
            tied="embed.tokens.weight" if config.tied else None,
            cast_weights=True,
            float8=("blocks.*.attention.*", "blocks.*.feed_forward.*"),
            compiled=("norm", "head"),
            context=True,
        )


def layer_cost(config: DecoderConfig) -> int:
    """Multiplications per token in one block's matrices; attention itself is left out."""
    attention = 2 * config.width * config.head_size * (config.heads + config.kv_heads)
    matrices = 3 if config.activation == "swiglu" else 2
    return attention + matrices * config.width * config.hidden


def tensor_plan(config: DecoderConfig) -> dict[str, Split]:
    block: dict[str, Split] = {
        "attention_norm": "norm",
        "attention": "gather",
        "attention.q": "heads",
        "attention.k": "heads",
        "attention.v": "heads",
        "attention.o": "row",
        "feed_forward_norm": "norm",
        "feed_forward": "gather",
        "feed_forward.up": "column",
        "feed_forward.down": "row",
    }
    if config.activation == "swiglu":
        block["feed_forward.gate"] = "column"
    if config.qk_norm:
        block |= {"attention.q_norm": "head-norm", "attention.k_norm": "head-norm"}
    return {
        "embed": "scatter",
        "embed.tokens": "embedding",
        **{f"blocks.*.{name}": how for name, how in block.items()},
        "norm": "norm",
        "head": "tied-head" if config.tied else "head",
    }


INITIAL_STD = 0.02  # GPT-2's, and the default of Hugging Face's initializer_range


def initial_std(config: DecoderConfig, name: str, std: float = INITIAL_STD) -> float | None:
    """Standard deviation of a parameter's initial values, by its name; None: norms start at one, biases at zero.

    As in GPT-2, what is added to the residual stream starts smaller the more layers add to it.
    """
    module, _, kind = name.rpartition(".")
    if kind == "bias" or module.endswith("norm"):
        return None
    if module.endswith(("attention.o", "feed_forward.down")):
        return std / math.sqrt(2 * config.layers)
    return std
