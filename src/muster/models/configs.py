"""Sizes and options of each model, without torch: a recipe is checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

NormKind = Literal["layer", "batch"]
Form = Literal["auto", "recurrent", "toeplitz", "chunked", "fft"]


@dataclass(frozen=True)
class LMUCTCConfig:
    """channels counts one direction; theta_frames is in frames after subsampling."""

    width: int
    blocks: int
    channels: int
    order: int
    theta_frames: float
    kernel: int
    ff_mult: int
    bidirectional: bool = True
    causal: bool = False
    norm: NormKind = "layer"
    dropout: float = 0.0
    mels: int = 80
    vocab: int = 29

    def __post_init__(self) -> None:
        if self.causal and self.bidirectional:
            raise ValueError(
                "causal and bidirectional are both true; a causal model uses past frames only: "
                "set bidirectional to false"
            )
        if not self.causal and self.kernel % 2 == 0:
            raise ValueError(f"kernel is {self.kernel}; centred convolutions need an odd one")


@dataclass(frozen=True)
class LMUAttentionConfig:
    """theta in frames; form "recurrent" steps through time as in the guide, for comparison."""

    mels: int = 80
    width: int = 512
    blocks: int = 4
    heads: int = 8
    order: int = 256
    theta: float = 1000.0
    form: Form = "auto"
    norm: NormKind = "layer"
    dropout: float = 0.0
    vocab: int = 29


class RopeScaling(NamedTuple):
    """Llama 3.1's stretching of slow rotations beyond the length it was first trained at."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True)
class DecoderConfig:
    vocab: int
    layers: int
    width: int
    heads: int
    hidden: int  # of the feed-forward
    kv_heads: int = 0  # 0: as many as heads
    head_size: int = 0  # 0: width / heads
    positions: int = 1024  # the longest sequence
    position: Literal["learned", "rotary"] = "learned"
    norm: Literal["layer", "rms"] = "layer"
    activation: Literal["gelu", "swiglu"] = "gelu"
    bias: bool = True  # on every linear layer
    qkv_bias: bool = True  # on q, k, v
    qk_norm: bool = False  # RMSNorm of each head of q and k, before rotary positions (Qwen3)
    tied: bool = True
    eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    window: int | None = None  # tokens a token looks back at most (Mistral)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (
            ("kv_heads", self.kv_heads or self.heads),
            ("head_size", self.head_size or self.width // self.heads),
        ):
            object.__setattr__(self, name, value)
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.position == "rotary" and self.head_size % 2:
            raise ValueError(f"head_size {self.head_size} is odd; rotary positions turn pairs")


@dataclass(frozen=True)
class WhisperConfig:
    vocab: int
    width: int
    encoder_layers: int
    encoder_heads: int
    encoder_hidden: int  # of the feed-forward
    decoder_layers: int
    decoder_heads: int
    decoder_hidden: int
    mels: int = 80
    source_positions: int = 1500  # the longest window: two frames each, 20 ms
    target_positions: int = 448  # the most tokens, prompt and end included
    dropout: float = 0.0  # on what is added to the residual stream, and on its beginning

    def __post_init__(self) -> None:
        for name in ("encoder_heads", "decoder_heads"):
            if self.width % (heads := getattr(self, name)):
                raise ValueError(f"width {self.width} is not a multiple of {name} {heads}")


@dataclass(frozen=True)
class ResNetConfig:
    """The "small" stem, 3×3 and without pooling, is for images below 64 pixels."""

    depth: Literal[18, 50] = 18
    classes: int = 1000
    channels: int = 3
    stem: Literal["imagenet", "small"] = "imagenet"

    def __post_init__(self) -> None:
        for name, known in (("depth", (18, 50)), ("stem", ("imagenet", "small"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {known}")


@dataclass(frozen=True)
class MnistNetConfig:
    classes: int = 10
    channels: int = 1
    width: int = 32  # of the first convolution
    hidden: int = 128
