"""What data parallelism sends in one optimizer step: gathered weights and summed gradients."""

from __future__ import annotations

from collections import Counter

from muster.plan.held import FLOAT, Stage
from muster.plan.memory import ZERO_LIVE, Choice, held_bytes

# (kind, bytes that a rank puts in, ranks that take part) → times per optimizer step
Traffic = Counter[tuple[str, int, int]]


def data_traffic(choice: Choice, stage: Stage, cast: bool = True) -> Traffic:
    """Between ranks that see different data. `cast`: FSDP may round this model's weights. DDP's and
    DeepSpeed's buckets are not told apart: what they carry together counts as one message."""
    layout = choice.layout
    if layout.zero:
        return _zero(choice, stage)
    if choice.sharded:
        return _fsdp(choice, stage, choice.low if cast else FLOAT)
    if layout.data_ranks > 1:
        return Counter({("all_reduce", FLOAT * stage.trained, layout.replicate): 1})
    return Counter()


def _fsdp(choice: Choice, stage: Stage, low: int) -> Traffic:
    """Each block is gathered for its forward and again for its backward pass, the rest once. In a
    pipeline, what the backward pass of one micro-batch gathered serves the forward pass of another."""
    layout, shards = choice.layout, choice.layout.shard
    passes = choice.accumulation * choice.pieces
    blocks, rest = passes * (1 if choice.keep_gathered else 2), passes
    sums = passes if choice.reduce_each else 1
    if layout.pipeline > 1:
        blocks, rest, sums = 1 if choice.keep_gathered else passes + 1, 1, 1
    sent: Traffic = Counter()
    for (_, name), size in stage.groups(shards).items():
        sent["all_gather", low * size, shards] += rest if name is None else blocks
    for size in stage.groups(shards, trained=True).values():
        sent["reduce_scatter", FLOAT * size * shards, shards] += sums
        sent["all_reduce", FLOAT * size, layout.replicate] += sums
    return Counter({key: times for key, times in sent.items() if key[2] > 1})


def _zero(choice: Choice, stage: Stage) -> Traffic:
    """Stages 1 and 2 gather the new weights, stage 3 those that each micro-batch needs. Stage 1 sums
    when the gradients are complete, the others after every micro-batch."""
    ranks, low = choice.layout.shard, choice.low
    passes = choice.accumulation
    if choice.layout.zero < 3:
        own = held_bytes(choice, stage)["master weights"] // FLOAT
        sums = passes if choice.layout.zero == 2 else 1
        return Counter(
            {("all_gather", low * own, ranks): 1, ("all_reduce", low * stage.trained, ranks): sums}
        )
    shares = {piece: -(-piece.numel // ranks) for piece in stage.pieces}
    again = max(0, stage.numel - ZERO_LIVE) // ranks
    summed = ranks * sum(n for piece, n in shares.items() if piece.trained)
    sent: Traffic = Counter()
    sent["all_gather", low * sum(shares.values()), ranks] += passes
    sent["all_gather", low * again, ranks] += passes if again else 0
    sent["reduce_scatter", low * summed, ranks] += passes
    return +sent
