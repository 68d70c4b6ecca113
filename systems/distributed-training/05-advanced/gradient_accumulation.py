"""Gradient accumulation: a large batch in small pieces, and the proof that nothing changes.

    torchrun --nproc_per_node=2 05-advanced/gradient_accumulation.py

Three rules make N ranks × M micro-batches the same as one large batch:
1. Sum losses over tokens and divide once, by the tokens of the *global* batch. The mean of means,
   `loss / accumulation_steps`, is another gradient as soon as micro-batches have unequal lengths.
2. DDP averages over ranks; multiply by their number where the loss is already divided by all tokens.
3. Send gradients once, with the last micro-batch: `no_sync()` before it.

Asserted on every rank against one backward pass over the whole batch: the largest difference, over
the largest gradient, is below 1e-12 in float64 and 1e-5 in float32; the mean of means is further off
than 1e-3; `no_sync` gives the same gradients for 1/M of the bytes.
"""

import argparse
import copy
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from muster import models
from muster.data.loader import IGNORE
from muster.launch.cluster import own_arguments
from muster.launch.join import joined

VOCAB = 256


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="gpt2-micro", help="any of muster's decoders")
    parser.add_argument("--micro-batches", type=int, default=4, help="per rank")
    parser.add_argument("--rows", type=int, default=2, help="sequences per micro-batch")
    parser.add_argument("--length", type=int, default=64, help="tokens of the longest sequence")
    return parser.parse_args(own_arguments(sys.argv[1:]))


def make_batch(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets `[rows, length]` of lengths between a few and `length`."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (rows, length + 1), generator=generator)
    lengths = torch.randint(4, length + 1, (rows, 1), generator=generator)
    beyond = torch.arange(length) >= lengths
    return tokens[:, :-1], tokens[:, 1:].masked_fill(beyond, IGNORE)


def summed(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The loss of all tokens that count. In float64 `log_softmax` must not round to float32."""
    logits = model(tokens)[..., :VOCAB].flatten(0, 1)
    return nn.functional.cross_entropy(
        logits, targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )


class Counter:
    """DDP's own all-reduce, counted."""

    def __init__(self) -> None:
        self.messages, self.bytes = 0, 0

    def hook(self, _, bucket) -> torch.futures.Future[Tensor]:
        self.messages += 1
        self.bytes += bucket.buffer().nbytes
        averaged = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(averaged, async_op=True).get_future().then(lambda f: f.value()[0])


def accumulate(model, batches, loss_of, once: bool) -> tuple[Tensor, Counter]:
    """The gradient of all micro-batches of all ranks, as DDP leaves it on this one."""
    wrapped, counter = DistributedDataParallel(copy.deepcopy(model)), Counter()
    wrapped.register_comm_hook(None, counter.hook)
    for i, (tokens, targets) in enumerate(batches):
        last = i == len(batches) - 1
        with nullcontext() if last or not once else wrapped.no_sync():
            loss_of(wrapped, tokens, targets).backward()
    return flat(wrapped), counter


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def apart(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def compare(mesh, wanted: argparse.Namespace, dtype: torch.dtype):
    """How far from the large batch: rule by rule, and what was sent."""
    torch.manual_seed(0)
    model = models.build(wanted.preset, vocab=VOCAB).to(mesh.device, dtype)
    count = mesh.world * wanted.micro_batches
    tokens, targets = (t.to(mesh.device) for t in make_batch(count * wanted.rows, wanted.length))
    units = int((targets != IGNORE).sum())
    pieces = list(zip(tokens.chunk(count), targets.chunk(count), strict=True))
    mine = pieces[mesh.rank :: mesh.world]

    large = copy.deepcopy(model)
    (summed(large, tokens, targets) / units).backward()

    def divided_once(net, x, y):
        return summed(net, x, y) * mesh.world / units

    def mean_of_means(net, x, y):
        return summed(net, x, y) / (y != IGNORE).sum() / wanted.micro_batches

    right, once = accumulate(model, mine, divided_once, once=True)
    always, each = accumulate(model, mine, divided_once, once=False)
    wrong, _ = accumulate(model, mine, mean_of_means, once=True)
    reference = flat(large)
    return [apart(g, reference) for g in (right, always, wrong)], once, each


def main() -> None:
    wanted = options()
    with joined() as mesh:
        for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            (right, always, wrong), once, each = compare(mesh, wanted, dtype)
            name = str(dtype).removeprefix("torch.")
            assert right < limit, f"{name}: accumulated is {right:.1e} from the large batch"
            assert always < limit, f"{name}: without no_sync, {always:.1e} from the large batch"
            assert wrong > 1e-3, f"{name}: the mean of means is only {wrong:.1e} off"
            assert each.bytes == wanted.micro_batches * once.bytes, "no_sync saved nothing"
            if mesh.first:
                print(f"{name}: sum, divided once   {right:.0e} from the large batch")
                print(f"{name}: mean of means       {wrong:.0e} from it")
                for sent, how in ((once, "with no_sync"), (each, "without")):
                    print(
                        f"{name}: {how:12} {sent.messages} all-reduces, {sent.bytes / 2**20:.1f} MiB"
                    )
        if mesh.first:
            print(
                f"{mesh.world} rank(s) × {wanted.micro_batches} micro-batches equal the large batch "
                f"(float32: {right:.0e}); no_sync sends 1/{wanted.micro_batches} of the bytes; the "
                f"mean of means is {wrong:.0%} off"
            )


if __name__ == "__main__":
    main()
