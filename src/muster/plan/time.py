"""How long an optimizer step takes: what the device computes, what it waits for, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass

from muster.hardware.catalogue import Accelerator
from muster.plan.held import FLOAT, Stage
from muster.plan.kernels import Speeds, host_seconds
from muster.plan.memory import Choice
from muster.plan.profile import Load
from muster.plan.traffic import data_traffic

OPTIMIZER_BYTES = (
    40  # AdamW reads four numbers and writes three; the norm reads, clipping does both
)
OPTIMIZER_CALLS = 200  # operations of a step that are not the model's
BUS = 0.8  # of a link's rate that NCCL was seen to reach
LATENCY_S = 2e-5  # of one collective
FIRST_S = 4e-3  # until a GPU that the last step left empty has work again
HOST_ADAM = 100e9  # bytes per second of AdamW on a server's processor
OVERLAP = 0.9  # of communication that hides under computing, at most


@dataclass(frozen=True)
class Duration:
    """Seconds of one optimizer step, by what they go to. They add up."""

    matrices: float
    memory: float  # kernels that only move numbers
    host: float  # Python, where the device waits for it
    tensor: float  # messages between tensor ranks
    data_parallel: float  # messages of gradients and shards that computing does not hide
    bubble: float  # a pipeline filling and draining
    optimizer: float
    loading: float  # samples that are not ready in time

    @property
    def total(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Cluster:
    """So many devices, `per_node` of them to a machine."""

    device: Accelerator
    world: int
    per_node: int

    @property
    def nodes(self) -> int:
        return math.ceil(self.world / self.per_node)

    def bandwidth(self, size: int, stride: int = 1) -> float:
        """Bytes per second of a ring of `size` ranks, every `stride`-th. Across machines, each rank of
        a machine brings its own share of the network, up to what the links inside carry."""
        own = self.device.measured
        link = own.get("link_gb_per_s", BUS * self.device.link_gb_per_s) * 1e9
        if size * stride <= self.per_node:
            return link
        inside = max(1, self.per_node // stride)
        network = own.get("network_gb_per_s", BUS * self.device.network_gb_per_s) * 1e9
        return min(link, network * min(inside, size)) if inside > 1 else network


def collective(kind: str, whole: float, size: int, bandwidth: float) -> float:
    """Seconds; `whole` is the array as all ranks together have it, as nccl-tests counts."""
    if size == 1 or not whole:
        return 0.0
    trips = 2 if kind == "all_reduce" else 1
    return trips * ((size - 1) / size * whole / bandwidth + LATENCY_S)


@dataclass(frozen=True)
class Tally:
    """Seconds of one micro-batch's forward and backward pass."""

    matrices: float
    memory: float
    tensor: float
    host: float  # that Python takes to start it all


def tally(load: Load, cluster: Cluster) -> Tally:
    speeds = Speeds.of(cluster.device)
    matrices = memory = tensor = 0.0
    for work, _, count in load.work:
        seconds = count * speeds.seconds(work)
        if work.kind == "memory":
            memory += seconds
        else:
            matrices += seconds
    for message, _, count in load.messages:
        size = len(message.ranks)
        whole = message.bytes * (size if message.kind == "all_gather" else 1)
        tensor += count * collective(message.kind, whole, size, cluster.bandwidth(size))
    return Tally(matrices, memory, tensor, host_seconds(load.calls, speeds))


def step_time(
    choice: Choice,
    stage: Stage,
    once: Tally,
    cluster: Cluster,
    *,
    rounded: bool = True,
    loading: float = 0.0,
    fused: float = 1.0,
) -> Duration:
    """Of the slowest rank. `once` is what `stage` does for one micro-batch; `rounded`: FSDP may round
    this model's weights; `loading`: seconds to load the step's samples, in the background; `fused`:
    what compiling leaves of the time of small kernels, where that was not recorded."""
    speeds, layout = Speeds.of(cluster.device), choice.layout
    matrices, memory, tensor = once.matrices, once.memory * fused, once.tensor
    waiting = max(0.0, once.host - matrices - memory)
    busy = matrices + memory + waiting + tensor
    passes = choice.accumulation * choice.pieces
    bubble = busy * (layout.pipeline - 1) * choice.accumulation
    exposed = _exposed(choice, stage, cluster, busy, rounded)
    optimizer = _optimizer(choice, stage, cluster, speeds)
    total = passes * busy + bubble + exposed + optimizer
    return Duration(
        matrices=passes * matrices,
        memory=passes * memory,
        host=passes * waiting + _start(speeds, waiting),
        tensor=passes * tensor,
        data_parallel=exposed,
        bubble=bubble,
        optimizer=optimizer,
        loading=max(0.0, loading - total),
    )


def _start(speeds: Speeds, waiting: float) -> float:
    """The step's own few operations; a device that waits anyway is not kept waiting by them."""
    return host_seconds(OPTIMIZER_CALLS, speeds) if waiting else FIRST_S * speeds.launch_s / 8e-6


def _exposed(choice: Choice, stage: Stage, cluster: Cluster, busy: float, rounded: bool) -> float:
    """What is left of gathering weights and summing gradients beside `busy` seconds of computing for
    each micro-batch, two thirds of them backwards."""
    layout, passes = choice.layout, choice.accumulation * choice.pieces
    gathers = sums = 0.0
    for (kind, size, ranks), times in data_traffic(choice, stage, rounded).items():
        copies = kind == "all_reduce" and choice.sharded  # of shards, between groups of shards
        stride = layout.tensor * (layout.shard if copies else 1)
        whole = size * (ranks if kind == "all_gather" else 1)
        seconds = times * collective(kind, whole, ranks, cluster.bandwidth(ranks, stride))
        if kind == "all_gather":
            gathers += seconds
        else:
            sums += seconds
    if choice.offload != "none" and choice.sharded:  # shards come from the host, and go there
        gathers += 2 * passes * FLOAT * stage.numel / layout.shard / _bus(cluster)
        sums += FLOAT * stage.trained / layout.shard / _bus(cluster)
    summing = passes if choice.reduce_each or layout.zero > 1 else 1
    left = _left(sums, summing * busy * 2 / 3)
    if layout.zero in (1, 2):  # the new weights, when the step is done
        return left + gathers
    return left + _left(gathers, passes * busy)


def _left(messages: float, computing: float) -> float:
    return max(messages * (1 - OVERLAP), messages - computing)


def _optimizer(choice: Choice, stage: Stage, cluster: Cluster, speeds: Speeds) -> float:
    layout = choice.layout
    mine = stage.trained / (layout.shard if not layout.zero else layout.world)
    if choice.offload == "none":
        return OPTIMIZER_BYTES * mine / speeds.bytes
    sharing = min(cluster.per_node, cluster.world)  # ranks that step on one processor
    moved = (FLOAT + choice.low) * mine if layout.zero else 0.0
    return moved / _bus(cluster) + OPTIMIZER_BYTES * mine * sharing / HOST_ADAM


def _bus(cluster: Cluster) -> float:
    """Bytes per second between a device and its host."""
    device = cluster.device
    return device.measured.get("host_gb_per_s", BUS * device.host_gb_per_s) * 1e9
