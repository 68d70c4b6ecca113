"""What one rank's memory is filled with, term by term."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from muster.parallel.fsdp import DTYPES
from muster.parallel.layout import Layout
from muster.plan.held import FLOAT, REST, Group, Stage
from muster.plan.profile import Load

GIB = 2**30
CONTEXT = 0.78 * GIB  # CUDA's, with its libraries' kernels; seen on an H200
NCCL = 0.25 * GIB  # per group of ranks that talk
WORKSPACE = 0.07 * GIB  # cuBLAS
SLACK = 0.03  # of all that is allocated: gaps between tensors
MARGIN = 0.04  # of the device, that a plan leaves free
MOMENTS = 8  # bytes of AdamW's two averages
HALF = 2  # bytes of a weight in bfloat16 or float16
# DeepSpeed's, unless its JSON says otherwise, in numbers:
ZERO_BUCKET = 500_000_000  # gradients to sum at a time, set aside whether or not there are as many
ZERO_LIVE = 500_000_000  # gathered weights of stage 3 that wait for the backward pass
ZERO_PREFETCH = 50_000_000

Offload = Literal["none", "optimizer", "all"]
PARTS = (
    "weights",
    "master weights",
    "gradients",
    "optimizer",
    "activations",
    "buffers",
    "slack",
    "context",
)


@dataclass(frozen=True)
class Need:
    """Bytes of one rank. `parts` are on its device at the step's highest point, `host` beside it;
    `held` are the tensors themselves, wherever they rest: exact."""

    parts: dict[str, float]
    held: dict[str, int]
    host: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def allocated(self) -> float:
        """What torch.cuda.max_memory_allocated will say."""
        return self.total - self.parts["slack"] - self.parts["context"]

    @property
    def largest(self) -> str:
        return max(self.parts, key=self.parts.__getitem__)


@dataclass(frozen=True)
class Choice:
    """Everything that decides what a rank holds, and how fast it is."""

    layout: Layout
    precision: str
    rows: int  # samples per forward pass
    accumulation: int = 1
    pieces: int = 1  # micro-batches that flow through a pipeline at a time
    checkpointing: str = "none"
    offload: Offload = "none"
    compiled: bool = False
    reduce_each: bool = False  # FSDP sums the gradients of every micro-batch at once
    schedule: str = "1f1b"
    keep_gathered: bool = False  # FSDP's shard_grad_op: blocks stay whole until the backward pass

    @property
    def low(self) -> int:
        """Bytes of a weight as the forward pass has it."""
        return HALF if self.precision in DTYPES else FLOAT

    @property
    def sharded(self) -> bool:
        """By FSDP."""
        layout = self.layout
        return not layout.zero and not layout.plain and layout.data_ranks > 1

    @property
    def groups(self) -> int:
        """Groups of ranks that talk, besides everyone."""
        layout = self.layout
        return sum(size > 1 for size in layout.sizes.values()) + (layout.world > 1)


def need(choice: Choice, stage: Stage, load: Load, rank: int = 0, cast: bool = True) -> Need:
    """Of `rank`, one of those that hold `stage`. `cast`: FSDP may round this model's weights."""
    held = held_bytes(choice, stage, rank)
    moments = _moments(choice, stage, load, held, cast)
    top = max(moments, key=lambda moment: moment.total)
    parts = dict.fromkeys(PARTS, 0.0) | held | vars(top)
    host = _moved_to_host(choice, parts, held)
    parts["buffers"] += stage.buffers + WORKSPACE
    parts["slack"] = SLACK * sum(parts.values())
    parts["context"] = CONTEXT + NCCL * choice.groups
    return Need(parts, held, host)


def held_bytes(choice: Choice, stage: Stage, rank: int = 0) -> dict[str, int]:
    """What `rank` holds when the optimizer steps, without AdamW's counts of steps."""
    layout = choice.layout
    if layout.zero:
        return _held_by_zero(choice, stage, rank)
    shards = layout.shard if choice.sharded else 1
    shard = layout.data_rank(rank) % shards
    return {  # FSDP pads shards to equal size where they travel, and not AdamW's averages
        "weights": FLOAT * stage.shards(shards),
        "gradients": FLOAT * stage.shards(shards, trained=True),
        "optimizer": MOMENTS * stage.shards(shards, shard, trained=True),
    }


def _held_by_zero(choice: Choice, stage: Stage, rank: int) -> dict[str, int]:
    """DeepSpeed's flat partitions: weights in the lower precision, and a float32 copy of one's own."""
    ranks, low = choice.layout.shard, choice.low
    trained = [piece for piece in stage.pieces if piece.trained]
    if choice.layout.zero == 3:  # each parameter is cut
        weights = sum(-(-piece.numel // ranks) for piece in stage.pieces)
        own = touched = sum(-(-piece.numel // ranks) for piece in trained)
    else:
        weights, own, touched = stage.numel - stage.trained, 0, 0
        for matrices in (True, False):  # what decays, and what does not: cut as one, each
            sizes = [p.numel for p in trained if (len(p.shape) > 1) == matrices]
            part = -(-sum(sizes) // (2 * ranks)) * 2
            weights, own = weights + part * ranks, own + part
            touched += _touched(sizes, part * rank, part)
    return {
        "weights": low * weights,
        "master weights": FLOAT * own,
        "gradients": low * touched,
        "optimizer": MOMENTS * own,
    }


def _touched(sizes: list[int], start: int, length: int) -> int:
    """Stages 1 and 2 keep the gradient of a parameter that the border of a partition cuts, whole."""
    found = place = 0
    for size in sizes:
        if place < start + length and place + size > start:
            found += size
        place += size
    return found + max(0, start + length - max(place, start))  # and zeros after the last


@dataclass(frozen=True)
class _Moment:
    gradients: float
    activations: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        return self.gradients + self.activations + self.buffers


def _moments(
    choice: Choice, stage: Stage, load: Load, held: dict[str, int], cast: bool
) -> Iterator[_Moment]:
    """When memory may be at its highest. The last: all gradients are there, nothing else is left."""
    layout, gradients = choice.layout, held["gradients"]
    if layout.zero:
        yield from _zero_moments(choice, stage, load, held)
    elif choice.sharded and layout.pipeline > 1:
        yield from _sharded_pipeline(choice, stage, load, choice.low if cast else FLOAT)
    elif choice.sharded:
        yield from _fsdp_moments(choice, stage, load, choice.low if cast else FLOAT)
    elif layout.pipeline > 1:
        yield _Moment(gradients, sum(_in_flight(choice, stage, load)))
    elif layout.data_ranks > 1 or choice.accumulation > 1:  # DDP's buckets are the gradients
        yield _Moment(gradients, _highest(load))
    else:  # gradients appear as activations go
        for h in load.heights.values():
            yield _Moment(h.together - h.activations, h.activations)
    yield _Moment(gradients)


def _highest(load: Load) -> float:
    return max(h.activations for h in load.heights.values())


def _in_flight(choice: Choice, stage: Stage, load: Load) -> tuple[float, float]:
    """Activations of the micro-batch at work, and of those that wait for their way back."""
    layout = choice.layout
    place = 0 if stage.first else layout.pipeline - 1 if stage.last else 1
    ahead = choice.pieces if choice.schedule == "gpipe" else layout.pipeline - place
    inside = {m: h for m, h in load.heights.items() if stage.last or m.place.startswith("in ")}
    working = max((h.activations for h in inside.values()), default=0)
    kept = load.kept
    if not stage.last:  # without what comes after the blocks
        stacks = {m.region for m in inside}
        kept = min(kept, sum(stage.layers * _rise(load, s, stage.layers) for s in stacks))
    return working, (min(ahead, choice.pieces) - 1) * kept


def _rise(load: Load, stack: str, blocks: int) -> float:
    """Bytes that one block of a stack keeps for its backward pass."""
    heights = {
        m.place: h for m, h in load.heights.items() if (m.phase, m.region) == ("forward", stack)
    }
    if not {"in first", "in last"} <= set(heights):
        return 0.0
    last, first = heights["in last"].activations, heights["in first"].activations
    return (last - first) / max(1, blocks - 1)


def _fsdp_moments(choice: Choice, stage: Stage, load: Load, low: int) -> Iterator[_Moment]:
    """One block computes while the next arrives and the gradients of the one before leave."""
    shards, many = choice.layout.shard, choice.accumulation > 1
    size = {group: shards * n for group, n in stage.groups(shards).items()}
    trained = {group: shards * n for group, n in stage.groups(shards, trained=True).items()}
    rest, blocks = size.pop(REST, 0), list(size)
    message = low if shards > 1 else 0  # it is copied out when all of it is there
    whole = FLOAT if many and not choice.reduce_each else 0  # bytes of what is not summed yet
    fresh = 0 if whole and low == FLOAT else low  # of a micro-batch's own: added in place if it can
    summed = 0.0 if whole or not many else FLOAT * sum(trained.values()) / shards
    waiting = whole * sum(trained.values())
    largest = max(size.values(), default=0)
    gathered = sum(size.values()) if choice.keep_gathered else largest
    early, leaving = fresh * stage.early, 0
    learning = [p.numel for p in stage.pieces if p.trained and p.group != REST]
    newest = max(learning, default=0)  # a gradient that was just computed counts as an activation
    outside = low * (rest + (gathered if choice.keep_gathered else 0))
    for moment, height in load.heights.items():
        if not moment.place.startswith("in "):
            # Of the early gradients the head's, while it is computed, counts as an activation.
            yield _Moment(summed + waiting, height.activations, outside)
        elif moment.phase != "backward":  # FSDP lets go of a message when it has the next
            forwards = low * (rest + gathered) + 2 * message * largest
            yield _Moment(summed + waiting, height.activations, forwards)
    for i, group in reversed(list(enumerate(blocks))):
        new = trained.get(group, 0)
        buffers = low * rest + leaving
        if choice.keep_gathered:
            buffers += low * gathered
        else:
            buffers += low * size[group] + message * (size[blocks[i - 1]] if i else 0)
        active = _height_in(load, group, blocks)
        just = fresh * max(0, new - newest)
        yield _Moment(summed + waiting + early + just, active, buffers)
        gathered -= size[group]
        waiting, leaving = waiting - whole * new, FLOAT * new
        summed += 0.0 if many and not whole else FLOAT * new / shards
    last = fresh * trained.get(REST, 0)
    ending = max(
        (h.activations for m, h in load.heights.items() if m.place == "in first"), default=0
    )
    yield _Moment(summed + waiting + early, ending, low * rest + leaving)
    yield _Moment(summed + waiting + last, 0.0, FLOAT * trained.get(REST, 0))


def _height_in(load: Load, group: Group, blocks: list[Group]) -> float:
    """Activations while one block runs backwards: from the last on they fall as they rose."""
    stack = _stack(group)
    inside = [g for g in blocks if _stack(g) == stack]
    after = len(inside) - 1 - inside.index(group)
    place = "in last" if len(inside) > 1 else "in first"
    highest = [
        h.activations
        for m, h in load.heights.items()
        if (m.phase, m.region, m.place) == ("backward", stack, place)
    ]
    return max(highest, default=0) - after * _rise(load, stack, len(inside))


def _stack(group: Group) -> str:
    return (group[1] or "").rpartition(".")[0]


def _sharded_pipeline(choice: Choice, stage: Stage, load: Load, low: int) -> Iterator[_Moment]:
    """Blocks stay gathered between the micro-batches of a schedule, and gradients whole."""
    block = max((n for (_, name), n in stage.groups().items() if name), default=0)
    whole = FLOAT * stage.trained
    newest = max((p.numel for p in stage.pieces if p.group[1]), default=0)
    fresh = low * (block - newest) if low < FLOAT else 0
    working, others = _in_flight(choice, stage, load)
    yield _Moment(whole + fresh, working + others, low * stage.numel)
    yield _Moment(whole, others, low * (stage.numel + block))  # the last one arrives


def _zero_moments(
    choice: Choice, stage: Stage, load: Load, held: dict[str, int]
) -> Iterator[_Moment]:
    """DeepSpeed sets a bucket aside for gradients. While it is emptied there are copies: of what it
    holds at stage 3, of one's own part at stage 2, which are then added to those before."""
    ranks, level, low = choice.layout.shard, choice.layout.zero, choice.low
    gradients, own = held["gradients"], held["master weights"] // FLOAT
    bucket, live, copies = low * ZERO_BUCKET, 0, 0.0
    if level == 3:
        block = max((n for (_, name), n in stage.groups().items() if name), default=0)
        live = low * min(stage.numel, ZERO_LIVE + ZERO_PREFETCH + block)
        copies = low * min(stage.trained, ZERO_BUCKET) * (1 + 1 / ranks)
    elif level == 2:
        copies = low * own + (gradients if choice.accumulation > 1 else 0)
    else:
        gradients = max(gradients, low * stage.trained)  # whole until they are summed
    yield _Moment(gradients, _highest(load), bucket + live)
    yield _Moment(gradients, 0.0, bucket + live + copies)


def _moved_to_host(choice: Choice, parts: dict[str, float], held: dict[str, int]) -> float:
    """Takes what is offloaded out of `parts`; returns its bytes."""
    if choice.offload == "none":
        return 0.0
    moved = ["master weights", "optimizer"]
    if choice.sharded or choice.offload == "all":
        moved.append("weights")
    host = sum(held.get(part, 0) for part in moved)
    for part in moved:
        parts[part] = 0.0
    gradients = held["gradients"] if choice.sharded else held["master weights"]
    if choice.sharded or choice.layout.zero > 1:  # they leave with every bucket
        parts["gradients"] = max(0.0, parts["gradients"] - held["gradients"])
    return float(host + gradients)
