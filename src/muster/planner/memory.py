"""Memory of one rank, term by term."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from muster.hardware.rehearsal import CONTEXT_BYTES
from muster.parallel.blocks import Checkpointing
from muster.parallel.deepspeed_config import packing_order
from muster.parallel.dtypes import DTYPES
from muster.parallel.layout import Layout
from muster.planner.optimizer import ADAMW, OptimizerChoice
from muster.planner.profile import ModelCost
from muster.planner.shards import FLOAT, REST, Group, Stage
from muster.planner.trace import TracePoint

GIB = 2**30
NCCL = 0.25 * GIB  # buffers per process group
WORKSPACE = 0.07 * GIB  # cuBLAS
SLACK = 0.03  # of allocated memory: allocator fragmentation
MARGIN = 0.04  # of the device's memory, left free
HALF = 2  # bytes of a weight in bfloat16 or float16
# DeepSpeed's defaults, in elements:
ZERO_BUCKET = 500_000_000  # reduce_bucket_size, allocated in full
ZERO_LIVE = 500_000_000  # gathered stage-3 weights kept for the backward pass
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
class MemoryEstimate:
    """Bytes of one rank. `parts` are on its device at the step's peak, `host` is offloaded to CPU memory;
    `static` are weights, gradients and optimizer state on either, exact."""

    parts: dict[str, float]
    static: dict[str, int]
    host: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def allocated(self) -> float:
        """Predicts torch.cuda.max_memory_allocated."""
        return self.total - self.parts["slack"] - self.parts["context"]

    @property
    def largest(self) -> str:
        return max(self.parts, key=self.parts.__getitem__)


@dataclass(frozen=True)
class Choice:
    """The settings that determine memory and step time of a rank."""

    layout: Layout
    precision: str
    rows: int  # samples per forward pass
    accumulation: int = 1
    microbatches: int = 1  # per pipeline schedule step
    checkpointing: Checkpointing = "none"
    offload: Offload = "none"
    compiled: bool = False
    reduce_each: bool = False  # FSDP reduce-scatters after every micro-batch
    schedule: str = "1f1b"
    keep_gathered: bool = False  # FSDP's shard_grad_op: no reshard after the forward pass
    optimizer: OptimizerChoice = ADAMW

    @property
    def low(self) -> int:
        """Bytes per weight in the forward pass."""
        return HALF if self.precision in DTYPES else FLOAT

    @property
    def sharded(self) -> bool:
        """By FSDP."""
        return self.layout.sharded

    @property
    def groups(self) -> int:
        """Process groups, with the default one where there are several ranks."""
        layout = self.layout
        sizes = {} if layout.ddp else layout.weight_sizes
        return sum(n > 1 for n in (*sizes.values(), layout.context, layout.world))


def estimate_memory(
    choice: Choice,
    stage: Stage,
    workload: ModelCost,
    rank: int = 0,
    *,
    cast: bool = True,
    replayed: int | None = None,
) -> MemoryEstimate:
    """Of `rank`, one of those that hold `stage`. `cast`: FSDP may cast this model's weights to `precision`.
    `replayed`: with CUDA graphs, the sets of gradients beside the one that a backward pass makes."""
    static = static_memory(choice, stage, rank)
    if replayed is None:
        points = _memory_points(choice, stage, workload, static, cast)
    else:
        points = _replayed_points(choice, workload, static["gradients"], replayed)
    peak = max(points, key=lambda point: point.total)
    parts = dict.fromkeys(PARTS, 0.0) | static | vars(peak)
    host = _moved_to_host(choice, parts, static)
    parts["buffers"] += stage.buffers + WORKSPACE
    parts["slack"] = SLACK * sum(parts.values())
    parts["context"] = CONTEXT_BYTES + NCCL * choice.groups
    return MemoryEstimate(parts, static, host)


def static_memory(choice: Choice, stage: Stage, rank: int = 0) -> dict[str, int]:
    """Bytes that `rank` holds at the optimizer step, without the optimizer's `step` tensors."""
    layout = choice.layout
    if layout.zero:
        return _zero_static_memory(choice, stage, rank)
    shards = layout.shards if choice.sharded else 1
    shard = layout.shard_rank(rank) if choice.sharded else 0
    return {  # FSDP pads weight and gradient shards to equal size, not the optimizer's state
        "weights": FLOAT * stage.shards(shards),
        "gradients": FLOAT * stage.shards(shards, trained=True),
        "optimizer": choice.optimizer.state_bytes(stage, shards, shard),
    }


def _zero_static_memory(choice: Choice, stage: Stage, rank: int) -> dict[str, int]:
    """DeepSpeed's flat partitions: weights in the lower precision, and float32 master weights."""
    ranks, low = choice.layout.shard, choice.low
    trained = [p for p in stage.parameters if p.trained]
    if choice.layout.zero == 3:  # each parameter is partitioned
        weights = sum(-(-p.numel // ranks) for p in stage.parameters)
        own = overlapping = sum(-(-p.numel // ranks) for p in trained)
    else:
        weights, own, overlapping = stage.numel - stage.trained, 0, 0
        for matrices in (True, False):  # parameter groups with and without weight decay
            sizes = [p.numel for p in trained if (len(p.shape) > 1) == matrices]
            sizes.sort(key=packing_order)
            part = -(-sum(sizes) // (2 * ranks)) * 2
            weights, own = weights + part * ranks, own + part
            overlapping += _overlapping(sizes, part * rank, part)
    return {
        "weights": low * weights,
        "master weights": FLOAT * own,
        "gradients": low * overlapping,
        "optimizer": choice.optimizer.least_bytes * own,
    }


def _overlapping(sizes: list[int], start: int, length: int) -> int:
    """Elements of the parameters that overlap a partition: stages 1 and 2 keep their gradients whole."""
    found = offset = 0
    for size in sizes:
        if offset < start + length and offset + size > start:
            found += size
        offset += size
    return found + max(0, start + length - max(offset, start))  # and padding after the last


@dataclass(frozen=True)
class _MemoryPoint:
    gradients: float
    activations: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        return self.gradients + self.activations + self.buffers


def _memory_points(
    choice: Choice,
    stage: Stage,
    workload: ModelCost,
    static: dict[str, int],
    cast: bool,
) -> Iterator[_MemoryPoint]:
    """Points of the step where memory may peak. At the last one only the gradients are left."""
    layout, gradients = choice.layout, static["gradients"]
    if layout.zero:
        yield from _zero_points(choice, stage, workload, static)
    elif choice.sharded and layout.pipeline > 1:
        yield from _sharded_pipeline(choice, stage, workload, choice.low if cast else FLOAT)
    elif choice.sharded:
        yield from _fsdp_points(choice, stage, workload, choice.low if cast else FLOAT)
    elif layout.pipeline > 1:
        yield _MemoryPoint(gradients, sum(_in_flight(choice, stage, workload)))
    elif layout.only_replicas and layout.world > 1:  # DDP's buckets are the gradients
        beside = gradients if choice.accumulation > 1 else 0  # until the last micro-batch
        yield _MemoryPoint(gradients + beside, _peak_activations(workload))
    elif choice.accumulation > 1:
        yield _MemoryPoint(gradients, _peak_activations(workload))
    else:  # gradients replace activations
        for h in workload.peaks.values():
            yield _MemoryPoint(h.with_gradients - h.activations, h.activations)
    yield _MemoryPoint(gradients)


def _replayed_points(
    choice: Choice, workload: ModelCost, gradients: int, beside: int
) -> Iterator[_MemoryPoint]:
    """New gradients replace activations in every capture. Replicas sum a copy of all of them."""
    for h in workload.peaks.values():
        yield _MemoryPoint(beside * gradients + h.with_gradients - h.activations, h.activations)
    copies = int(choice.layout.world > 1)
    yield _MemoryPoint((1 + beside + copies) * gradients)


def _peak_activations(workload: ModelCost) -> float:
    return max(h.activations for h in workload.peaks.values())


def _in_flight(
    choice: Choice, stage: Stage, workload: ModelCost, low: int = FLOAT
) -> tuple[float, float]:
    """Activations of the running micro-batch, and of those waiting for their backward pass. `low`: bytes
    of an element of a new gradient, which counts as an activation."""
    layout = choice.layout
    stage_index = 0 if stage.first else layout.pipeline - 1 if stage.last else 1
    ahead = choice.microbatches if choice.schedule == "gpipe" else layout.pipeline - stage_index
    inside = {
        m: h
        for m, h in workload.peaks.items()
        if (stage.depths.get(m.region) if m.position.startswith("in ") else stage.last)
    }
    kept, working = workload.kept, max((h.activations for h in inside.values()), default=0.0)
    if not stage.last:  # recorded with the head, which is on another rank
        kept = min(kept, sum(n * _kept_per_block(workload, s, n) for s, n in stage.depths.items()))
        outside = [p.numel for p in stage.parameters if p.trained and not p.group[1]]
        working = low * max(outside, default=0)  # the embedding's gradient comes last, alone
        for point, peak in inside.items():
            if point.phase != "backward":
                working = max(working, peak.activations)
            elif point.position != "in first":  # a tied head's gradient waits for the embedding's
                working = max(working, peak.activations - low * stage.tied)
    return working, (min(ahead, choice.microbatches) - 1) * kept


def _kept_per_block(workload: ModelCost, stack: str, blocks: int) -> float:
    """Bytes that one block of a stack saves for its backward pass."""
    peaks = {
        m.position: h
        for m, h in workload.peaks.items()
        if (m.phase, m.region) == ("forward", stack)
    }
    if not {"in first", "in last"} <= set(peaks):
        return 0.0
    last, first = peaks["in last"].activations, peaks["in first"].activations
    return (last - first) / max(1, blocks - 1)


def _fsdp_points(
    choice: Choice, stage: Stage, workload: ModelCost, low: int
) -> Iterator[_MemoryPoint]:
    """One block computes while the next is all-gathered and the previous one's gradients are
    reduce-scattered."""
    shards, many = choice.layout.shards, choice.accumulation > 1
    size = {group: shards * n for group, n in stage.groups(shards).items()}
    trained = {group: shards * n for group, n in stage.groups(shards, trained=True).items()}
    rest, blocks = size.pop(REST, 0), list(size)
    message = low if shards > 1 else 0  # all-gather output, copied out when complete
    whole = FLOAT if many and not choice.reduce_each else 0  # bytes of what is not summed yet
    fresh = 0 if whole and low == FLOAT else low  # a micro-batch's own, unless accumulated in place
    summed = 0.0 if whole or not many else FLOAT * sum(trained.values()) / shards
    waiting = whole * sum(trained.values())
    largest = max(size.values(), default=0)
    gathered = sum(size.values()) if choice.keep_gathered else largest
    early, leaving = fresh * stage.early, 0
    learning = [p.numel for p in stage.parameters if p.trained and p.group != REST]
    newest = max(learning, default=0)  # a gradient that was just computed counts as an activation
    outside = low * (rest + (gathered if choice.keep_gathered else 0))
    for point, peak in workload.peaks.items():
        if not point.position.startswith("in "):
            # Of the early gradients the head's, while it is computed, counts as an activation.
            yield _MemoryPoint(summed + waiting, peak.activations, outside)
        elif point.phase != "backward":  # FSDP frees an all-gather output after the next one
            forwards = low * (rest + gathered) + 2 * message * largest
            yield _MemoryPoint(summed + waiting, peak.activations, forwards)
    for i, group in reversed(list(enumerate(blocks))):
        new = trained.get(group, 0)
        buffers = low * rest + leaving
        if choice.keep_gathered:
            buffers += low * gathered
        else:
            buffers += low * size[group] + message * (size[blocks[i - 1]] if i else 0)
        active = _backward_activations(workload, group, blocks)
        just = fresh * max(0, new - newest)
        yield _MemoryPoint(summed + waiting + early + just, active, buffers)
        gathered -= size[group]
        waiting, leaving = waiting - whole * new, FLOAT * new
        summed += 0.0 if many and not whole else FLOAT * new / shards
    last = fresh * trained.get(REST, 0)
    ending = max(
        (h.activations for m, h in workload.peaks.items() if m.position == "in first"), default=0
    )
    yield _MemoryPoint(summed + waiting + early, ending, low * rest + leaving)
    yield _MemoryPoint(summed + waiting + last, 0.0, FLOAT * trained.get(REST, 0))


def _backward_activations(workload: ModelCost, group: Group, blocks: list[Group]) -> float:
    """Activations during one block's backward pass: each finished block frees what it saved."""
    stack = _stack(group)
    inside = [g for g in blocks if _stack(g) == stack]
    after = len(inside) - 1 - inside.index(group)
    position = "in last" if len(inside) > 1 else "in first"
    highest = [
        h.activations
        for m, h in workload.peaks.items()
        if (m.phase, m.region, m.position) == ("backward", stack, position)
    ]
    return max(highest, default=0) - after * _kept_per_block(workload, stack, len(inside))


def _stack(group: Group) -> str:
    return (group[1] or "").rpartition(".")[0]


def _sharded_pipeline(
    choice: Choice, stage: Stage, workload: ModelCost, low: int
) -> Iterator[_MemoryPoint]:
    """Weights stay gathered and gradients unsharded between the micro-batches of a schedule."""
    block = max((n for (_, name), n in stage.groups().items() if name), default=0)
    whole = FLOAT * stage.trained
    newest = max((p.numel for p in stage.parameters if p.group[1]), default=0)
    fresh = low * (block - newest) if low < FLOAT else 0
    working, others = _in_flight(choice, stage, workload, low)
    yield _MemoryPoint(whole + fresh, working + others, low * stage.numel)
    yield _MemoryPoint(whole, others, low * (stage.numel + block))  # the last all-gather


def _zero_points(
    choice: Choice, stage: Stage, workload: ModelCost, static: dict[str, int]
) -> Iterator[_MemoryPoint]:
    """DeepSpeed allocates a gradient bucket: at stage 3 once, at stage 2 with the first gradient of each
    backward pass, at stage 1 of each step. Reducing it makes copies: of the bucket, then of this rank's
    partition, which at stage 2 is accumulated."""
    level, low = choice.layout.zero, choice.low
    gradients, bucket = static["gradients"], low * ZERO_BUCKET
    if level == 3:
        block = max((n for (_, name), n in stage.groups().items() if name), default=0)
        live = low * min(stage.numel, ZERO_LIVE + ZERO_PREFETCH + block)
        copies = low * min(stage.trained, ZERO_BUCKET) * (1 + 1 / choice.layout.shard)
        yield _MemoryPoint(gradients, _peak_activations(workload), bucket + live)
        yield _MemoryPoint(gradients, 0.0, bucket + live + copies)
        return
    own, many = static["master weights"] // FLOAT, choice.accumulation > 1
    share = min(1.0, ZERO_BUCKET / max(1, stage.trained))  # of the gradients that fill the bucket
    copied = share * low * stage.trained
    early = _before_gradients(stage, workload)
    if choice.offload != "none":  # the partition goes to the host
        own = gradients = 0
    if level == 1:
        whole = low * stage.trained  # until they are reduced
        for point, peak in workload.peaks.items():
            now = whole if many else peak.with_gradients - peak.activations
            held = bucket if many or point not in early else 0
            yield _MemoryPoint(now, peak.activations, held)
        yield _MemoryPoint(whole, 0.0, bucket + max(0, gradients - copied))
    else:
        before = gradients if many else 0  # of earlier micro-batches
        for point, peak in workload.peaks.items():
            held = 0 if point in early else bucket
            yield _MemoryPoint(before, peak.activations, held)
            if share < 1 and point.phase == "backward" and point.position.startswith("in "):
                # The first reduction; then a later one, when this rank's partition is allocated.
                rest = (1 - share) * peak.activations
                yield _MemoryPoint(before, rest, bucket + copied)
                yield _MemoryPoint(before + gradients, rest, bucket)
                rest = max(0.0, 1 - 2 * share) * peak.activations
                yield _MemoryPoint(before + gradients, rest, bucket + copied)
        yield _MemoryPoint(before, 0.0, bucket + max(copied, gradients))
    step = low * own + (FLOAT * own if low < FLOAT else 0)  # one flat copy, and in float32
    yield _MemoryPoint(gradients, 0.0, step)


def _before_gradients(stage: Stage, workload: ModelCost) -> set[TracePoint]:
    """The forward pass and, where the head is tied, the backward pass of the loss: the head's gradient
    comes last, with the embedding's. The final norm's comes when the logits are gone."""
    forward = [point for point in workload.peaks if point.phase != "backward"]
    last = next((point.region for point in reversed(forward) if point.region), None)
    loss = [
        point
        for point in workload.peaks
        if stage.tied and point.region == last and point.position.startswith("after ")
    ]
    return {*forward, *loss}


def _moved_to_host(choice: Choice, parts: dict[str, float], static: dict[str, int]) -> float:
    """Removes what is offloaded from `parts`; returns its bytes."""
    if choice.offload == "none":
        return 0.0
    moved = ["master weights", "optimizer"]
    if choice.sharded or choice.offload == "all":
        moved.append("weights")
    host = sum(static.get(part, 0) for part in moved)
    for part in moved:
        parts[part] = 0.0
    gradients = static["gradients"] if choice.sharded else static["master weights"]
    if choice.sharded or choice.layout.zero > 1:  # offloaded with every bucket
        parts["gradients"] = max(0.0, parts["gradients"] - static["gradients"])
    return float(host + gradients)
