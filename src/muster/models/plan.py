"""How a model may be split, as data beside the model. `muster.parallel` carries it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Split = Literal[
    "embedding",  # rows of the vocabulary on each rank; its outputs are summed
    "scatter",  # its output enters the residual stream
    "norm",  # works on the residual stream
    "gather",  # a group of layers that reads the whole stream once
    "heads",  # attention heads on each rank; its output stays in pieces
    "column",  # output features on each rank; its output stays in pieces
    "row",  # input features on each rank; its outputs are summed into the stream
    "head",  # reads the stream; its logits stay in pieces of the vocabulary
    "tied-head",  # the same, with the embedding's own weight
]


@dataclass(frozen=True)
class ParallelPlan:
    """Where a model's blocks begin, which matrices are cut how, and the sizes that limit the cuts."""

    blocks: tuple[str, ...]  # class names of what repeats: sharded, checkpointed and compiled alone
    compiled: tuple[str, ...] = ()  # names of what is worth compiling besides the blocks
    tensor: Mapping[str, Split] = field(default_factory=dict)  # module name, `*` for any index
    layers: int = 0  # blocks a pipeline may be cut between; 0: it may not be cut
    heads: int = 0
    kv_heads: int = 0
    vocab: int = 0
    hidden: int = 0  # of the feed-forward
    width: int = 0  # of the residual stream
    layer_cost: int = 0  # multiplications per token, of one block …
    head_cost: int = 0  # … and of the head
    tied: bool = False  # the head is the embedding: first and last stage share a weight
    cast_weights: bool = False  # the forward pass may use rounded copies of the weights
