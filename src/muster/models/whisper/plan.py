"""How Whisper may be parallelized, as data.

Layers of a pipeline are counted through the encoder and then the decoder. Under tensor parallelism the
residual streams stay replicated: neither the positions of a window nor the tokens of a text need be a
multiple of the tensor ranks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from muster.models.plan import ParallelPlan, Split

if TYPE_CHECKING:
    from muster.models.configs import WhisperConfig

POSITIONS_PER_TOKEN = 12  # encoder positions of 20 ms for one token of text: four tokens a second


def parallel_plan(config: WhisperConfig) -> ParallelPlan:
    heads = math.gcd(config.encoder_heads, config.decoder_heads)
    return ParallelPlan(
        blocks=("WhisperEncoderLayer", "WhisperDecoderLayer"),
        compiled=(
            "model.encoder.conv1",
            "model.encoder.conv2",
            "model.encoder.layer_norm",
            "proj_out",
        ),
        tensor=_tensor_plan(),
        costs=_costs(config),
        embeds=config.encoder_layers,
        heads=heads,
        kv_heads=heads,
        vocab=config.vocab,
        hidden=math.gcd(config.encoder_hidden, config.decoder_hidden),
        width=config.width,
        tied="model.decoder.embed_tokens.weight",
        cast_weights=True,
    )


def _costs(config: WhisperConfig) -> tuple[int, ...]:
    """Multiplications in each layer's matrices per position of the encoder; attention itself is left
    out. The convolutions belong to the first layer, the head to the last."""
    square = config.width**2
    encoder = 4 * square + 2 * config.width * config.encoder_hidden
    text = 6 * square + 2 * config.width * config.decoder_hidden  # all but the keys and values of …
    decoder = 2 * square + text // POSITIONS_PER_TOKEN  # … cross-attention
    costs = [encoder] * config.encoder_layers + [decoder] * config.decoder_layers
    costs[0] += 3 * (2 * config.mels * config.width + square)
    costs[-1] += config.vocab * config.width // POSITIONS_PER_TOKEN
    return tuple(costs)


def _tensor_plan() -> dict[str, Split]:
    attention: dict[str, Split] = {
        ".q_proj": "heads",
        ".k_proj": "heads",
        ".v_proj": "heads",
        ".out_proj": "row",
    }
    own: dict[str, Split] = {"self_attn": "gather", "fc1": "column", "fc2": "row"}
    own |= {f"self_attn{name}": how for name, how in attention.items()}
    cross: dict[str, Split] = {"encoder_attn": "gather-both"}
    cross |= {f"encoder_attn{name}": how for name, how in attention.items()}
    return {
        "model.decoder.embed_tokens": "embedding",
        **{f"model.encoder.layers.*.{name}": how for name, how in own.items()},
        **{f"model.decoder.layers.*.{name}": how for name, how in (own | cross).items()},
        "proj_out": "tied-head",
    }
