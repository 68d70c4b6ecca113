"""Collectives of data parallelism in one optimizer step: of weights and of gradients."""

from __future__ import annotations

from collections import Counter

from muster.planner.memory import ZERO_LIVE, Choice, static_memory
from muster.planner.shards import FLOAT, Stage

# (kind, input bytes of a rank, size of the group) → times per optimizer step
Traffic = Counter[tuple[str, int, int]]


def data_traffic(choice: Choice, stage: Stage, cast: bool = True) -> Traffic:
    """Between data-parallel ranks. `cast`: FSDP may cast this model's weights. All buckets of DDP and
    DeepSpeed count as one collective."""
    layout = choice.layout
    if layout.zero:
        return _zero(choice, stage)
    if choice.sharded:
        return _fsdp(choice, stage, choice.low if cast else FLOAT)
    if layout.only_replicas and layout.world > 1:
        return Counter({("all_reduce", FLOAT * stage.trained, layout.world): 1})
    return Counter()


def fsdp_passes(choice: Choice) -> tuple[int, int, int]:
    """How often FSDP gathers a block and the rest in a step, and sums gradients. Each block is all-gathered for
    its forward and again for its backward pass, the rest once. In a pipeline, the forward pass of a micro-batch
    uses what another's backward pass gathered."""
    passes = choice.accumulation * choice.microbatches
    if choice.layout.pipeline > 1:
        return (1 if choice.keep_gathered else passes + 1), 1, 1
    sums = passes if choice.reduce_each else 1
    return passes * (1 if choice.keep_gathered else 2), passes, sums


def _fsdp(choice: Choice, stage: Stage, low: int) -> Traffic:
    layout, shards = choice.layout, choice.layout.shards
    blocks, rest, sums = fsdp_passes(choice)
    sent: Traffic = Counter()
    for (_, name), size in stage.groups(shards).items():
        sent["all_gather", low * size, shards] += rest if name is None else blocks
    for size in stage.groups(shards, trained=True).values():
        sent["reduce_scatter", FLOAT * size * shards, shards] += sums
        sent["all_reduce", FLOAT * size, layout.replicate] += sums
    return Counter({key: times for key, times in sent.items() if key[2] > 1})


def _zero(choice: Choice, stage: Stage) -> Traffic:
    """Stages 1 and 2 all-gather the updated weights, stage 3 the weights for each micro-batch. Stage 1
    reduces the accumulated gradients, the others after every micro-batch."""
    ranks, low = choice.layout.shard, choice.low
    passes = choice.accumulation
    if choice.layout.zero < 3:
        own = static_memory(choice, stage)["master weights"] // FLOAT
        sums = passes if choice.layout.zero == 2 else 1
        return Counter(
            {("all_gather", low * own, ranks): 1, ("all_reduce", low * stage.trained, ranks): sums}
        )
    shares = {p: -(-p.numel // ranks) for p in stage.parameters}
    regathered = max(0, stage.numel - ZERO_LIVE) // ranks
    summed = ranks * sum(n for p, n in shares.items() if p.trained)
    sent: Traffic = Counter()
    sent["all_gather", low * sum(shares.values()), ranks] += passes
    sent["all_gather", low * regathered, ranks] += passes if regathered else 0
    sent["reduce_scatter", low * summed, ranks] += passes
    return +sent
