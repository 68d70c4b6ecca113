"""How a model may be parallelized, as data. `muster.parallel` applies it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Split = Literal[
    "embedding",  # rows of the vocabulary on each rank; its outputs are summed
    "scatter",  # its output enters the residual stream
    "norm",  # works on the residual stream
    "head-norm",  # works on this rank's heads, [batch, heads, time, size]
    "gather",  # a group of layers that reads the whole stream once
    "gather-both",  # the same with two inputs, such as cross-attention
    "heads",  # attention heads on each rank; its output stays sharded
    "column",  # output features on each rank; its output stays sharded
    "row",  # input features on each rank; its outputs are summed into the stream
    "head",  # reads the stream; its logits stay sharded along the vocabulary
    "tied-head",  # the same, with the embedding's own weight
]


@dataclass(frozen=True)
class ParallelPlan:
    """A model's blocks, the sharding of its matrices, and the sizes that limit it."""

    blocks: tuple[
        str, ...
    ]  # class names of repeated layers: units of sharding, checkpointing and compilation
    compiled: tuple[str, ...] = ()  # names of other modules to compile
    tensor: Mapping[str, Split] = field(default_factory=dict)  # module name, `*` for any index
    no_tensor: str = ""  # why there is no tensor plan, where that is not plain
    costs: tuple[int, ...] = ()  # of each block that a pipeline may be split between, in
    # multiplications per token, with the head in the last; empty: it may not be split
    embeds: int = 0  # the block that the token embedding comes before; those before are an encoder
    heads: int = 0
    kv_heads: int = 0
    vocab: int = 0
    hidden: int = 0  # of the feed-forward
    width: int = 0  # of the residual stream
    tied: str | None = None  # the embedding's weight, if it is also the head's: two stages share it
    cast_weights: bool = False  # weights may be cast to the lower precision
    # Linear layers whose products may be float8; `*` is any one part of a name.
    float8: tuple[str, ...] = ()
    context: bool = False  # its attention can be shared by ranks with a part of each sequence

    @property
    def layers(self) -> int:
        return len(self.costs)

    @property
    def shards_sequence(self) -> bool:
        """Whether tensor ranks can shard the residual stream along the sequence."""
        return "scatter" in self.tensor.values()
