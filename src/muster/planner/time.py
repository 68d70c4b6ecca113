"""Time of an optimizer step: computation, communication, and waiting."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from muster.hardware.catalogue import Accelerator
from muster.planner.kernels import LAUNCH_US, Speeds, host_seconds
from muster.planner.memory import Choice
from muster.planner.profile import ModelCost
from muster.planner.shards import FLOAT, Stage
from muster.planner.traffic import data_traffic, fsdp_passes

COPIED_BYTES = 8  # per gradient: those of a graph's first micro-batch, before the second; those of other shapes
ADDED_BYTES = 12  # per gradient, and each further micro-batch: added to what is there
STEP_CALLS = 150  # operations of a step that are not the model's: the optimizer's, the loop's
# Of FSDP, for each group of parameters and each parameter in it, as torch 2.13 launches them:
HOOK_CALLS = (15, 0)  # in a micro-batch
GATHER_CALLS = (12, 1)  # when it gathers the weights
SUM_CALLS = (10, 2)  # when it sums the gradients
BUS = 0.8  # fraction of a link's rate that NCCL reaches
LATENCY_S = 2e-5  # of one collective
IDLE_S = 4e-3  # until a GPU has work queued again, where the host waits for it at every step
HOST_ADAM = 100e9  # bytes per second of AdamW on a server CPU
OVERLAP = 0.9  # maximum fraction of communication that overlaps with computation


@dataclass(frozen=True)
class Duration:
    """Seconds of one optimizer step, by cause. They add up."""

    matrices: float
    memory: float  # memory-bound kernels
    host: float  # launching that takes longer than all of the rest
    tensor: float  # communication between tensor ranks
    context: float  # and between context ranks
    data_parallel: float  # exposed communication of gradients and shards
    bubble: float  # of the pipeline
    optimizer: float
    loading: float  # waiting for data

    @property
    def total(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Cluster:
    """`world` devices, `per_node` in each node."""

    device: Accelerator
    world: int
    per_node: int

    @property
    def nodes(self) -> int:
        return math.ceil(self.world / self.per_node)

    def bandwidth(self, size: int, stride: int = 1) -> float:
        """Bytes per second of a ring of `size` ranks, every `stride`-th. Across nodes, the
        network bandwidth of the ranks of a node adds up, limited by the links within it."""
        own = self.device.measured
        link = own.get("link_gb_per_s", BUS * self.device.link_gb_per_s) * 1e9
        if size * stride <= self.per_node:
            return link
        inside = max(1, self.per_node // stride)
        network = own.get("network_gb_per_s", BUS * self.device.network_gb_per_s) * 1e9
        return min(link, network * min(inside, size)) if inside > 1 else network


def collective(kind: str, whole: float, size: int, bandwidth: float) -> float:
    """Seconds; `whole` is the size of the full array, as in nccl-tests."""
    if size == 1 or not whole:
        return 0.0
    trips = 2 if kind == "all_reduce" else 1
    return trips * ((size - 1) / size * whole / bandwidth + LATENCY_S)


@dataclass(frozen=True)
class MicroBatchTime:
    """Seconds of one micro-batch's forward and backward pass."""

    matrices: float
    memory: float
    tensor: float
    host: float  # launch overhead
    context: float = 0.0


def micro_batch_time(
    workload: ModelCost, cluster: Cluster, context_stride: int = 0
) -> MicroBatchTime:
    """`context_stride`: how far apart context ranks are, if there are any; tensor ranks lie side by side."""
    speeds = Speeds.of(cluster.device)
    matrices = memory = tensor = context = 0.0
    for cost, _, count in workload.ops:
        seconds = count * speeds.seconds(cost)
        if cost.kind == "memory":
            memory += seconds
        else:
            matrices += seconds
    for message, _, count in workload.messages:
        size, stride = len(message.ranks), message.ranks[1] - message.ranks[0]
        whole = message.bytes * (size if message.kind == "all_gather" else 1)
        seconds = count * collective(message.kind, whole, size, cluster.bandwidth(size, stride))
        if stride == context_stride:
            context += seconds
        else:
            tensor += seconds
    host = host_seconds(workload.calls, speeds)
    return MicroBatchTime(matrices, memory, tensor, host, context)


def replayed(
    time: MicroBatchTime, stage: Stage, cluster: Cluster, accumulation: int, *, uniform: bool
) -> MicroBatchTime:
    """By a CUDA graph, which writes the gradients of every micro-batch to the same memory. `uniform`: all of
    one shape."""
    moved = 0.0 if uniform else COPIED_BYTES
    if accumulation > 1:
        moved += (COPIED_BYTES + ADDED_BYTES * (accumulation - 1)) / accumulation
    adding = moved * stage.trained / Speeds.of(cluster.device).bytes
    return replace(time, host=0.0, memory=time.memory + adding)


def step_time(
    choice: Choice,
    stage: Stage,
    micro_batch: MicroBatchTime,
    cluster: Cluster,
    *,
    rounded: bool = True,
    loading: float = 0.0,
    fused: float = 1.0,
) -> Duration:
    """Of the slowest rank. `micro_batch`: time of `stage` for one micro-batch; `rounded`: FSDP may cast
    this model's weights; `loading`: seconds to load the step's samples in the background; `fused`:
    factor on the time of pointwise kernels, where fusion was not recorded."""
    speeds, layout = Speeds.of(cluster.device), choice.layout
    matrices, memory = micro_batch.matrices, micro_batch.memory * fused
    tensor, context = micro_batch.tensor, micro_batch.context
    busy = matrices + memory + tensor + context
    passes = choice.accumulation * choice.microbatches
    bubble = busy * (layout.pipeline - 1) * choice.accumulation
    exposed = _exposed(choice, stage, cluster, busy, rounded)
    optimizer = _optimizer(choice, stage, cluster, speeds)
    device = passes * busy + bubble + exposed + optimizer
    launching = passes * micro_batch.host + _sharding(choice, stage, speeds) + _outside(speeds)
    idle = _idle(choice, speeds)
    host = max(launching + idle - device, idle)
    return Duration(
        matrices=passes * matrices,
        memory=passes * memory,
        host=host,
        tensor=passes * tensor,
        context=passes * context,
        data_parallel=exposed,
        bubble=bubble,
        optimizer=optimizer,
        loading=max(0.0, loading - device - host),
    )


def _outside(speeds: Speeds) -> float:
    """What the host does in a step besides the model."""
    return host_seconds({"op": STEP_CALLS}, speeds)


def _sharding(choice: Choice, stage: Stage, speeds: Speeds) -> float:
    """What the host does in a step to gather weights and to sum gradients."""
    if not choice.sharded:
        return 0.0
    gathers, _, sums = fsdp_passes(choice)
    counts = {HOOK_CALLS: choice.accumulation * choice.microbatches, GATHER_CALLS: gathers}
    counts[SUM_CALLS] = sums
    groups, parameters = len(stage.groups()), len(stage.parameters)
    calls = sum(n * (each * groups + one * parameters) for (each, one), n in counts.items())
    return host_seconds({"op": calls}, speeds)


def _idle(choice: Choice, speeds: Speeds) -> float:
    """ZeRO's steps and offloading wait for the device, which has nothing to do until they go on."""
    waits = choice.layout.zero or choice.offload != "none"
    return IDLE_S * speeds.launch_s / (LAUNCH_US * 1e-6) if waits else 0.0


def _exposed(choice: Choice, stage: Stage, cluster: Cluster, busy: float, rounded: bool) -> float:
    """Communication of weights and gradients that does not overlap with the `busy` seconds of each
    micro-batch, two thirds of which are its backward pass. Both use the same links."""
    layout, passes = choice.layout, choice.accumulation * choice.microbatches
    gathers = sums = 0.0
    for (kind, size, ranks), times in data_traffic(choice, stage, rounded).items():
        copies = kind == "all_reduce" and choice.sharded  # HSDP: between replicas of shards
        stride = layout.tensor * (layout.shards if copies else 1)
        whole = size * (ranks if kind == "all_gather" else 1)
        seconds = times * collective(kind, whole, ranks, cluster.bandwidth(ranks, stride))
        if kind == "all_gather":
            gathers += seconds
        else:
            sums += seconds
    if choice.offload != "none" and choice.sharded:  # copies between host and device
        gathers += 2 * passes * FLOAT * stage.numel / layout.shards / _bus(cluster)
        sums += FLOAT * stage.trained / layout.shards / _bus(cluster)
    summing = passes if choice.reduce_each or layout.zero > 1 else 1
    left = _not_overlapped(sums, summing * busy * 2 / 3)
    if layout.zero in (1, 2):  # all-gather of the updated weights
        return left + gathers
    return left + _not_overlapped(gathers, passes * busy - (sums - left))


def _not_overlapped(messages: float, computing: float) -> float:
    return max(messages * (1 - OVERLAP), messages - computing)


def _optimizer(choice: Choice, stage: Stage, cluster: Cluster, speeds: Speeds) -> float:
    layout = choice.layout
    mine = stage.trained / layout.shards
    if choice.offload == "none":
        seconds = choice.optimizer.moved_bytes * mine / speeds.bytes
        return seconds + choice.optimizer.flops(stage) / speeds.matrix.get(
            "bf16", speeds.matrix["fp32"]
        )
    sharing = min(cluster.per_node, cluster.world)  # ranks that share one host
    moved = (FLOAT + choice.low) * mine if layout.zero else 0.0
    return moved / _bus(cluster) + choice.optimizer.moved_bytes * mine * sharing / HOST_ADAM


def _bus(cluster: Cluster) -> float:
    """Bytes per second between a device and its host."""
    device = cluster.device
    return device.measured.get("host_gb_per_s", BUS * device.host_gb_per_s) * 1e9
