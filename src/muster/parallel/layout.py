"""The sizes of a parallel run, in one frozen object that checks them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from muster.errors import RecipeError
from muster.workloads import workload

if TYPE_CHECKING:
    from muster.models.plan import ParallelPlan
    from muster.recipe.distributed import Distributed
    from muster.recipe.schema import Recipe

AXES = ("pipeline", "replicate", "shard", "context", "tensor")  # outermost first


@dataclass(frozen=True)
class Layout:
    """The size of each mesh axis; the product is the world size.

    `replicate` ranks hold the whole model and different data; `shard` ranks share one copy of the
    model and still see different data; `tensor` and `pipeline` ranks share one copy and one batch;
    `context` ranks share one batch, each with a part of every sequence. To the weights, context ranks are
    like data ranks: FSDP shards over `shard` × `context`, or with `ddp` each rank has all of them.
    Ranks are numbered with `pipeline` outermost and `tensor` innermost, so that ranks that
    communicate most are closest. `zero` is DeepSpeed's ZeRO stage, 0 for none.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    zero: int = 0
    context: int = 1
    ddp: bool = False  # context ranks hold all weights; without any, `shard` = 1 says so

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if size < 1:
                raise RecipeError(f"distributed.{axis}: {size}, but every size is at least 1")
        if self.zero and self.world != self.shard:
            raise RecipeError(
                f"distributed.strategy: zero{self.zero} shards over all ranks and multiplies with "
                "nothing else; use strategy=hybrid, whose `shard` axis is FSDP"
            )
        if self.context > 1 and self.pipeline > 1:
            raise RecipeError(
                f"distributed.context: {self} would send parts of sequences between pipeline stages, which "
                "is not there; set distributed.pipeline=1, or distributed.context=1"
            )
        if self.ddp and (self.context == 1 or self.world != self.replicate * self.context):
            raise ValueError(f"{self}: `ddp` is for replicas and context ranks")

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def data_ranks(self) -> int:
        """How many ranks see different samples: the divisor of the global batch."""
        return self.replicate * self.shard

    def data_rank(self, rank: int) -> int:
        """Which part of each global batch `rank` computes."""
        return rank // (self.tensor * self.context) % self.data_ranks

    def tensor_rank(self, rank: int) -> int:
        return rank % self.tensor

    def context_rank(self, rank: int) -> int:
        """Which part of each sequence `rank` computes."""
        return rank // self.tensor % self.context

    def pipeline_rank(self, rank: int) -> int:
        return rank // (self.tensor * self.context * self.data_ranks)

    @property
    def shards(self) -> int:
        """Ranks that FSDP or ZeRO shards one copy of the weights over."""
        return self.shard if self.ddp else self.shard * self.context

    def shard_rank(self, rank: int) -> int:
        return rank // self.tensor % self.shards

    @property
    def sharded(self) -> bool:
        """By FSDP, which also sums the gradients of several copies."""
        return not self.zero and not self.only_replicas and self.replicate * self.shards > 1

    @property
    def weight_sizes(self) -> dict[str, int]:
        """The axes of FSDP and of tensor and pipeline parallelism, outermost first."""
        return {
            "pipeline": self.pipeline,
            "replicate": self.replicate,
            "shard": self.shards,
            "tensor": self.tensor,
        }

    @property
    def collective_forward(self) -> bool:
        """Whether a forward pass has collectives over the data ranks."""
        return self.zero == 3 or (self.zero == 0 and self.shard > 1)

    @property
    def only_replicas(self) -> bool:
        """Only replicas: what DDP does."""
        return self.ddp or self.world == self.replicate

    def __str__(self) -> str:
        if self.zero:
            return f"zero{self.zero} over {self.shard} ranks"
        sizes = [f"{axis} {size}" for axis, size in self.sizes.items() if size > 1]
        return " × ".join(sizes) + (" (DDP)" if self.ddp else "") or "one rank"

    def check_world(self, world: int) -> None:
        if self.world != world:
            raise RecipeError(
                f"layout: {self} makes {self.world} ranks, but {world} were started; "
                "change the sizes or --gpus"
            )

    def check_model(self, plan: ParallelPlan, name: str, stages_per_rank: int = 1) -> None:
        """Refuse sizes that this model cannot be split into, with the number to change."""
        if self.tensor > 1 and not plan.tensor:
            raise _unsupported(name, "tensor", plan.no_tensor)
        if self.pipeline > 1 and not plan.layers:
            raise _unsupported(name, "pipeline")
        if self.context > 1 and not plan.context:
            raise _unsupported(name, "context")
        self.check_heads(plan.heads, plan.kv_heads, name)
        stages = self.pipeline * stages_per_rank
        if self.pipeline > 1 and stages > plan.layers:
            raise RecipeError(
                f"distributed.pipeline: {self.pipeline} ranks × {stages_per_rank} stages each is "
                f"{stages} stages, but {name} has {plan.layers} layers; use at most "
                f"{plan.layers // stages_per_rank} pipeline ranks (distributed.pipeline, or --gpus)"
            )

    def check_sequences(self, recipe: Recipe) -> None:
        """Refuse context ranks where there are no sequences of tokens, or none that divide evenly."""
        if self.context == 1:
            return
        if not workload(recipe.task).packed:
            raise RecipeError(
                f"distributed.context: {self.context}, but only causal-lm has sequences that ranks can "
                f"share, and this is {recipe.task}; set it to auto"
            )
        length = recipe.data.sequence_length
        sharded = self.tensor if recipe.distributed.tensor_options.sequence_parallel else 1
        unit = math.lcm(2 * self.context, self.context * sharded)
        if length % unit:
            near = [
                size for size in (length - length % unit, length - length % unit + unit) if size
            ]
            raise RecipeError(
                f"data.sequence_length: {length} is not a multiple of {unit}, which {self} needs: each "
                "context rank has two equal parts of every sequence; use "
                f"{' or '.join(map(str, near))}, or change distributed.context"
            )

    def check_heads(self, heads: int, kv_heads: int, name: str) -> None:
        """Tensor ranks have whole heads."""
        for what, size in (("heads", heads), ("key-value heads", kv_heads)):
            if size % self.tensor:
                raise RecipeError(
                    f"distributed.tensor: {self.tensor} does not divide the {size} {what} of {name}; "
                    f"use {_divisors(math.gcd(heads, kv_heads))}"
                )


def _unsupported(name: str, technique: str, reason: str = "") -> RecipeError:
    key = "context" if technique == "context" else "strategy"
    why = f" ({reason})" if reason else ""
    return RecipeError(
        f"distributed.{key}: {name} has no {technique}-parallel plan{why}; it trains with "
        "ddp, fsdp, hsdp, zero1, zero2, zero3"
    )


def _divisors(number: int) -> str:
    return " or ".join(str(d) for d in range(1, number + 1) if number % d == 0)


# world, options, ranks on each machine; without context ranks
Preset = Callable[[int, "Distributed", int], Layout]


def _shard_all(world: int, options: Distributed, local_world: int) -> Layout:
    return Layout(shard=world)


def _hybrid_shard(world: int, options: Distributed, local_world: int) -> Layout:
    """Replicas of a sharded model; by default one on each machine. On one machine that would be fsdp, and
    with one rank on each it would be ddp: there it is two, which an odd world size does not allow."""
    replicate, shard = options.replicate, options.shard
    if replicate == shard == "auto" and 1 < local_world < world:
        if world % local_world:
            raise RecipeError(
                f"distributed.strategy: hsdp makes one copy on each machine, but {world} ranks is no "
                f"multiple of the {local_world} on one machine; start as many ranks on each, or set "
                "distributed.replicate"
            )
        shard = local_world
    if isinstance(replicate, int) and isinstance(shard, int):
        return Layout(replicate=replicate, shard=shard)
    if isinstance(shard, int):
        return Layout(replicate=_rest(world, shard, "shard"), shard=shard)
    copies = replicate if isinstance(replicate, int) else 2
    return Layout(replicate=copies, shard=_rest(world, copies, "replicate"))


def _zero(stage: int) -> Preset:
    return lambda world, options, local_world: Layout(shard=world, zero=stage)


def _split(axis: str) -> Preset:
    """All ranks along one axis; where the recipe gives its size, the rest are replicas."""

    def layout(world: int, options: Distributed, local_world: int) -> Layout:
        size = getattr(options, axis)
        size = size if isinstance(size, int) else world
        sizes: dict[str, Any] = {axis: size}
        return Layout(**sizes, replicate=_rest(world, size, axis))

    return layout


def _product(world: int, options: Distributed, local_world: int) -> Layout:
    """The sizes; of those left open, `shard` takes the rest and the others are 1."""
    sizes = {axis: getattr(options, axis) for axis in AXES}
    if all(size == "auto" for size in sizes.values()):
        raise RecipeError(
            "distributed.strategy: hybrid needs sizes; set for instance distributed.tensor=2, and "
            "the rest is sharded"
        )
    sizes.pop("context")
    given: dict[str, Any] = {a: size for a, size in sizes.items() if isinstance(size, int)}
    if "shard" not in given:
        given["shard"] = _rest(world, math.prod(given.values()), " × ".join(given))
    return Layout(**given)


def _rest(world: int, size: int, axis: str) -> int:
    if world % size:
        near = max(d for d in range(1, world + 1) if world % d == 0 and d <= size)
        raise RecipeError(
            f"distributed.{axis}: {size} does not divide the {world} ranks; use {near}, or start "
            f"{size * max(1, round(world / size))} ranks"
        )
    return world // size


PRESETS: dict[str, Preset] = {
    "ddp": lambda world, options, local_world: Layout(replicate=world),
    "fsdp": _shard_all,
    "hsdp": _hybrid_shard,
    "zero1": _zero(1),
    "zero2": _zero(2),
    "zero3": _zero(3),
    "tensor": _split("tensor"),
    "pipeline": _split("pipeline"),
    "context": lambda world, options, local_world: Layout(replicate=world),
    "hybrid": _product,
}

SIZES_OF = {
    "auto": {"context"},
    "ddp": {"context"},
    "fsdp": {"context"},
    "hsdp": {"replicate", "shard", "context"},
    "tensor": {"tensor"},
    "pipeline": {"pipeline"},
    "context": {"context"},
}


NO_DEEPSPEED = {
    "config": "null",
    "offload_optimizer": "none",
    "offload_param": "none",
    "nvme_path": "null",
}


def unused_keys(strategy: str) -> dict[str, str]:
    """Keys that this strategy refuses, with the value that unsets them."""
    if strategy == "hybrid":
        return {}
    sizes = {
        f"distributed.{axis}": "auto" for axis in AXES if axis not in SIZES_OF.get(strategy, ())
    }
    if strategy.startswith("zero"):
        return sizes
    return sizes | {f"distributed.deepspeed.{key}": value for key, value in NO_DEEPSPEED.items()}


def layout_for(
    options: Distributed, world: int, strategy: str | None = None, local_world: int | None = None
) -> Layout:
    """The sizes that the recipe's strategy means on `world` ranks, `local_world` on each machine; by
    default all of them on one."""
    name = strategy or options.strategy
    name = "ddp" if name == "auto" else name
    local = local_world or world
    if name != "hybrid":
        for axis in AXES:
            if getattr(options, axis) != "auto" and axis not in SIZES_OF.get(name, set()):
                raise RecipeError(
                    f"distributed.{axis} is set, but strategy {name} does not use it; use "
                    f"{'ddp, fsdp, hsdp or ' if axis == 'context' else ''}strategy=hybrid, or set "
                    f"distributed.{axis}=auto"
                )
    zero = options.deepspeed
    unused = [k for k, v in vars(zero).items() if v not in (None, "none")]
    if unused and not name.startswith("zero"):
        raise RecipeError(
            f"distributed.deepspeed.{unused[0]} is set, but strategy {name} does not use DeepSpeed; use "
            "zero1, zero2 or zero3"
        )
    whole = world if name == "context" else 1
    context = options.context if isinstance(options.context, int) else whole
    rest = _rest(world, context, "context")
    try:
        layout = PRESETS[name](rest, options, max(1, local // context))
    except RecipeError as error:
        if context == 1:
            raise
        raise RecipeError(
            f"{error} (of the {world} ranks, {context} share each sequence, by distributed.context)"
        ) from None
    layout = replace(layout, context=context, ddp=name == "ddp" and context > 1)
    layout.check_world(world)
    return layout


def strategy_name(layout: Layout) -> str:
    """The strategy with these sizes."""
    if layout.zero:
        return f"zero{layout.zero}"
    if layout.ddp:
        return "ddp"
    used = [axis for axis, size in layout.sizes.items() if size > 1]
    names = {
        (): "single",
        ("replicate",): "ddp",
        ("shard",): "fsdp",
        ("replicate", "shard"): "hsdp",
        ("tensor",): "tensor",
        ("pipeline",): "pipeline",
        ("context",): "context",
        ("shard", "context"): "fsdp",
        ("replicate", "context"): "hsdp",
        ("replicate", "shard", "context"): "hsdp",
    }
    return names.get(tuple(used), "hybrid")
