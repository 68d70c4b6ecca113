"""Whisper, from log-mel frames to text tokens.

Parameters have the names that transformers gives them, and layers its class names. Unlike there, a
window may be shorter than 30 s: positions are cut to it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.models.attention import Cache
from muster.models.configs import WhisperConfig
from muster.models.decoder import Part, TiedHead
from muster.models.gpu_kernels import residual_stream
from muster.models.norm import LayerNorm
from muster.models.plan import ParallelPlan
from muster.models.weights import FreshWeights, Region
from muster.models.whisper.plan import parallel_plan
from muster.models.whisper.search import Search, generate

SOURCE_POSITIONS = "model.encoder.embed_positions.weight"


class WhisperCache(Cache):
    """Keys and values of the decoder: self-attention, and cross-attention once per layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoded: dict[int, tuple[Tensor, Tensor]] = {}

    def select(self, rows: Tensor) -> None:
        """Reorder self-attention to `rows`; cross-attention is unchanged."""
        self.layers = {i: (k[rows], v[rows]) for i, (k, v) in self.layers.items()}


class WhisperAttention(nn.Module):
    def __init__(self, width: int, heads: int, layer: int = 0) -> None:
        super().__init__()
        self.head_size, self.layer = width // heads, layer
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(
        self,
        x: Tensor,
        encoded: Tensor | None = None,
        cache: WhisperCache | None = None,
        causal: bool = False,
    ) -> Tensor:
        """x [batch, time, width] attends to itself, or to `encoded` [batch, source, width]. The
        number of heads is read off the projections: a rank may hold some of them."""
        q = self._heads(self.q_proj(x))
        if cache is not None and encoded is not None and self.layer in cache.encoded:
            k, v = cache.encoded[self.layer]
        else:
            source = x if encoded is None else encoded
            k, v = self._heads(self.k_proj(source)), self._heads(self.v_proj(source))
            if cache is not None and encoded is not None:
                cache.encoded[self.layer] = (k, v)
            elif cache is not None:
                k, v = cache.append(self.layer, k, v)
        if cache is not None:  # one new token sees all that came before it
            causal = causal and q.shape[2] > 1
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class WhisperEncoderLayer(nn.Module):
    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.self_attn = WhisperAttention(config.width, config.encoder_heads)
        self.self_attn_layer_norm = LayerNorm(config.width)
        self.fc1 = nn.Linear(config.width, config.encoder_hidden)
        self.fc2 = nn.Linear(config.encoder_hidden, config.width)
        self.final_layer_norm = LayerNorm(config.width)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + drop(self, self.self_attn(self.self_attn_layer_norm(x)))
        x = x + drop(self, self.fc2(F.gelu(self.fc1(self.final_layer_norm(x)))))
        if x.dtype == torch.float16:  # large encoders come close to its end
            limit = torch.finfo(x.dtype).max - 1000
            x = x.clamp(-limit, limit)
        return x


class WhisperDecoderLayer(nn.Module):
    def __init__(self, config: WhisperConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = WhisperAttention(config.width, config.decoder_heads, layer)
        self.self_attn_layer_norm = LayerNorm(config.width)
        self.encoder_attn = WhisperAttention(config.width, config.decoder_heads, layer)
        self.encoder_attn_layer_norm = LayerNorm(config.width)
        self.fc1 = nn.Linear(config.width, config.decoder_hidden)
        self.fc2 = nn.Linear(config.decoder_hidden, config.width)
        self.final_layer_norm = LayerNorm(config.width)
        self.dropout = config.dropout

    def forward(self, x: Tensor, encoded: Tensor, cache: WhisperCache | None = None) -> Tensor:
        """x [batch · beams, time, width]; encoded [batch, source, width]."""
        said = self.self_attn(self.self_attn_layer_norm(x), cache=cache, causal=True)
        x = x + drop(self, said)
        # Listening has no order, so a row's beams ask as one longer row: keys need no copies.
        asked = self.encoder_attn_layer_norm(x).reshape(encoded.shape[0], -1, encoded.shape[2])
        x = x + drop(self, self.encoder_attn(asked, encoded, cache).reshape(x.shape))
        return x + drop(self, self.fc2(F.gelu(self.fc1(self.final_layer_norm(x)))))


class ConvGELU(nn.Conv1d):
    """Of `[batch, time, channels]`, over three steps of time, as one product: a GPU's convolutions would first
    bring all states into another layout, and back."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel_size=3, stride=stride, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        time, (stride,) = x.shape[1], self.stride
        padded = F.pad(x, (0, 0, 1, 1))
        windows = torch.cat([padded[:, i : i + time : stride] for i in range(3)], dim=-1)
        return F.gelu(F.linear(windows, self.weight.transpose(1, 2).flatten(1), self.bias))


class WhisperEncoder(nn.Module):
    """Frames `[batch, frames, mels]` to states `[batch, frames / 2, width]`; a part that does not begin
    at the first layer, states to states."""

    def __init__(self, config: WhisperConfig, part: Part | None = None) -> None:
        super().__init__()
        part = part or Part(0, config.encoder_layers, config.encoder_layers)
        self.part = part
        if part.first:
            self.conv1 = ConvGELU(config.mels, config.width)
            self.conv2 = ConvGELU(config.width, config.width, stride=2)
            self.embed_positions = nn.Embedding(config.source_positions, config.width)
            self.embed_positions.requires_grad_(False)
        layers = range(part.start, part.stop)
        self.layers = nn.ModuleDict({str(i): WhisperEncoderLayer(config) for i in layers})
        self.layer_norm = LayerNorm(config.width) if part.last else None
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        x = residual_stream(self._embed(x) if self.part.first else x)
        for layer in self.layers.values():
            x = layer(x)
        return self.layer_norm(x) if self.layer_norm is not None else x

    def _embed(self, features: Tensor) -> Tensor:
        frames, most = features.shape[1], 2 * self.embed_positions.num_embeddings
        if frames % 2 or not 0 < frames <= most:
            raise ValueError(f"{frames} frames; Whisper takes an even number of at most {most}")
        x = self.conv2(self.conv1(features))
        x = x + self.embed_positions(torch.arange(frames // 2, device=x.device))
        return drop(self, x)


class WhisperDecoder(nn.Module):
    """Tokens `[batch, time]` and the encoder's output to states `[batch, time, width]`; a part that
    does not begin at the first layer, states to states."""

    def __init__(self, config: WhisperConfig, part: Part | None = None) -> None:
        super().__init__()
        part = part or Part(0, config.decoder_layers, config.decoder_layers)
        self.part = part
        if part.first or part.last:  # the head's weight too
            self.embed_tokens = nn.Embedding(config.vocab, config.width)
        if part.first:
            self.embed_positions = nn.Embedding(config.target_positions, config.width)
        layers = range(part.start, part.stop)
        self.layers = nn.ModuleDict({str(i): WhisperDecoderLayer(config, i) for i in layers})
        self.layer_norm = LayerNorm(config.width) if part.last else None
        self.dropout = config.dropout

    def forward(self, x: Tensor, encoded: Tensor, cache: WhisperCache | None = None) -> Tensor:
        if self.part.first:
            x = self._embed(x, cache.length if cache is not None else 0)
        x, encoded = residual_stream(x), residual_stream(encoded)
        for layer in self.layers.values():
            x = layer(x, encoded, cache)
        return self.layer_norm(x) if self.layer_norm is not None else x

    def _embed(self, tokens: Tensor, past: int) -> Tensor:
        positions = torch.arange(past, past + tokens.shape[1], device=tokens.device)
        return drop(self, self.embed_tokens(tokens) + self.embed_positions(positions))


class Whisper(nn.Module):
    """Logits `[batch, time, vocab or more]`, see `decoder.project`; or, with a `search`, new tokens."""

    def __init__(self, config: WhisperConfig, freeze_encoder: bool = False) -> None:
        super().__init__()
        self.config, self.freeze_encoder = config, freeze_encoder
        encoder, decoder = WhisperEncoder(config), WhisperDecoder(config)
        if freeze_encoder:
            encoder.requires_grad_(False)
        self.model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
        self.proj_out = TiedHead(decoder.embed_tokens)

    def forward(self, features: Tensor, tokens: Tensor, search: Search | None = None) -> Tensor:
        """`features` [batch, frames, mels], an even number of frames up to 2 · source_positions.

        With a `search`, `tokens` [batch, time] are the prompt, and the result is what follows,
        [batch, new], padded with `search.end`.
        """
        encoded = self.encode(features)
        if search is None:
            return self.proj_out(self.model["decoder"](tokens, encoded))
        return generate(search, tokens, CachedWhisper(self, encoded), self.config.target_positions)

    def encode(self, features: Tensor) -> Tensor:
        """[batch, frames / 2, width]"""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.freeze_encoder):
            return self.model["encoder"](features)  # type: ignore[no-any-return]

    @property
    def plan(self) -> ParallelPlan:
        return parallel_plan(self.config)


class WhisperPart(nn.Module):
    """Layers `start` … `stop - 1` of a Whisper, the encoder's first, for one stage of a pipeline.
    Parameters keep the names they have in the whole.

    A stage that ends in the encoder, or with it, passes on states `[batch, source, width]`; one that
    ends in the decoder also the encoder's output, which every layer of the decoder attends to.
    """

    def __init__(self, config: WhisperConfig, start: int, stop: int) -> None:
        super().__init__()
        self.config = config
        heard, said = config.encoder_layers, config.decoder_layers
        self.encodes, self.decodes = start < heard, stop > heard
        self.model = nn.ModuleDict()
        if self.encodes:
            self.model["encoder"] = WhisperEncoder(config, Part(start, min(stop, heard), heard))
        self.proj_out: TiedHead | None = None
        self.embeds = False
        if self.decodes:
            part = Part(max(start - heard, 0), stop - heard, said)
            decoder = self.model["decoder"] = WhisperDecoder(config, part)
            self.embeds = part.first
            if part.last:
                self.proj_out = TiedHead(decoder.embed_tokens)

    def forward(
        self,
        x: Tensor,
        encoded: Tensor | None = None,
        *,
        tokens: Tensor | None = None,
        cache: WhisperCache | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`x` [batch, frames, mels] or states; `encoded` [batch, source, width] from the stage before.
        Without `tokens` [batch, time] only the encoder's layers run, given `encoded` only the
        decoder's. Returns logits in the last stage."""
        if self.encodes and encoded is None:
            x = self.model["encoder"](x)
        if not self.decodes or tokens is None:
            return x
        if encoded is None:
            encoded = x  # the encoder ends in this stage, or at the end of the one before
        x = self.model["decoder"](tokens if self.embeds else x, encoded, cache)
        return (x, encoded) if self.proj_out is None else self.proj_out(x)

    @property
    def plan(self) -> ParallelPlan:
        return parallel_plan(self.config)


class CachedWhisper:
    """The decoder with its key-value cache, for one search."""

    def __init__(self, model: Whisper, encoded: Tensor) -> None:
        self.model, self.encoded, self.cache = model, encoded, WhisperCache()

    def next(self, tokens: Tensor) -> Tensor:
        """Logits [rows, vocab], float32, of what follows `tokens` [rows, time] and all before."""
        x = self.model.model["decoder"](tokens, self.encoded, self.cache)
        return next_logits(self.model.proj_out(x[:, -1:]), self.model.config.vocab)

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)


def next_logits(logits: Tensor, vocab: int) -> Tensor:
    """[rows, vocab], float32, of the last of [rows, time, vocab or more], which tensor ranks may hold in
    shards."""
    from torch.distributed.tensor import DTensor  # takes a second

    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    return logits[:, -1, :vocab].float()


def drop(module: nn.Module, x: Tensor) -> Tensor:
    p: float = module.dropout  # type: ignore[assignment]
    return F.dropout(x, p, module.training) if p else x


def initial_std(name: str, shape: tuple[int, ...]) -> float | None:
    """Standard deviation of a parameter's initial values; None: norms start at one, biases at zero.

    Layers preserve the scale of their inputs, the convolutions with the GELU behind them, which halves it.
    With one small std for all, as in transformers, a narrow encoder's output would initially depend on little
    besides its positions.
    """
    module, _, kind = name.rpartition(".")
    if kind == "bias" or module.endswith("layer_norm"):
        return None
    gain = 2.0 if ".conv" in module else 1.0
    return 0.02 if "embed_" in module else gain / math.sqrt(math.prod(shape[1:]))


class FreshWhisper:
    """Random weights, a function of (seed, name); the encoder's positions are sines and cosines."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def read(
        self, name: str, shape: tuple[int, ...], region: Region, device: torch.device
    ) -> Tensor:
        if name == SOURCE_POSITIONS:
            return sinusoids(*shape)[region].to(device)
        std = initial_std(name, shape)
        return FreshWeights(self.seed, lambda _: std).read(name, shape, region, device)


def sinusoids(positions: int, width: int) -> Tensor:
    """[positions, width]: sines, then cosines, of wavelengths from 2π to 20,000π positions."""
    slowing = math.log(10_000) / (width // 2 - 1)
    angle = torch.arange(positions)[:, None] * torch.exp(-slowing * torch.arange(width // 2))
    return torch.cat([angle.sin(), angle.cos()], dim=1)
