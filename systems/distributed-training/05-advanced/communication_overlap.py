"""Hiding communication: DDP sends a bucket of gradients while the backward pass makes the next.

    torchrun --nproc_per_node=2 05-advanced/communication_overlap.py
    torchrun --nproc_per_node=8 05-advanced/communication_overlap.py --preset gpt2 --length 1024

The last layers' gradients are ready first. As soon as `bucket_cap_mb` of them are, DDP starts their
all-reduce, which runs beside the rest of the backward pass. One bucket for everything cannot start
before the end: nothing is hidden. Very small buckets hide well but pay each message's latency.

Measured: the step; the same step under `no_sync` (compute alone). What is longer is *exposed*
communication. Times are this machine's: CPU ranks that share cores slow each other down.

Asserted: the way gradients travel changes neither them nor the bytes sent.
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from muster import models
from muster.launch.cluster import own_arguments
from muster.launch.join import joined

EVERYTHING = 1_000_000  # MiB: more than any model here


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="gpt2-micro", help="any of muster's decoders")
    parser.add_argument("--rows", type=int, default=4, help="sequences per rank")
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--buckets", type=float, nargs="+", default=[0.25, 1, 25], help="MiB")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args(own_arguments(sys.argv[1:]))


class Sent:
    """DDP's own all-reduce, counted. A hook may also compress what it sends: torch has bf16 and
    PowerSGD ones in `torch.distributed.algorithms.ddp_comm_hooks`."""

    def __init__(self) -> None:
        self.bytes, self.messages = 0, 0

    def hook(self, _, bucket) -> torch.futures.Future[Tensor]:
        self.bytes, self.messages = self.bytes + bucket.buffer().nbytes, self.messages + 1
        averaged = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(averaged, async_op=True).get_future().then(lambda f: f.value()[0])


def after_backward(model: nn.Module, sent: Sent) -> None:
    """By hand, what DDP does inside: correct, simple, and every byte of it exposed."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.div_(dist.get_world_size()))
        sent.bytes, sent.messages = sent.bytes + parameter.grad.nbytes, sent.messages + 1


def seconds(step: Callable[[bool], None], mesh, repeats: int) -> list[float]:
    """With and without sending, in turn, so that a machine's moods meet both; the median of each.
    Ranks start together. A GPU is waited for, or only the filling of its queue would be timed."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for send in (True, False) * repeats:
        mesh.barrier()
        begin = time.perf_counter()
        step(send)
        if mesh.device.type == "cuda":
            torch.cuda.synchronize()
        times[send].append(time.perf_counter() - begin)
    return [statistics.median(each) for each in times.values()]


def measure(mesh, model: nn.Module, tokens: Tensor, bucket: float | None, repeats: int):
    """One way of sending: bytes, messages, gradients, and the time with and without it."""
    sent, net = Sent(), copy.deepcopy(model)
    wrapped = DistributedDataParallel(net, bucket_cap_mb=bucket or EVERYTHING)
    wrapped.register_comm_hook(None, sent.hook)

    def step(send: bool) -> None:
        net.zero_grad(set_to_none=True)
        with nullcontext() if send and bucket else wrapped.no_sync():
            logits = wrapped(tokens[:, :-1])
            nn.functional.cross_entropy(
                logits.float().flatten(0, 1), tokens[:, 1:].flatten()
            ).backward()
        if send and not bucket:
            after_backward(net, sent)

    for _ in range(2):  # the first backward pass shows DDP the order in which gradients come
        step(True)
    sent.bytes = sent.messages = 0
    step(True)
    gradients = torch.cat([p.grad.flatten() for p in net.parameters()])
    counted = sent.bytes, sent.messages
    return gradients, *counted, *seconds(step, mesh, repeats)


def main() -> None:
    wanted = options()
    with joined() as mesh:
        torch.manual_seed(0)
        model = models.build(wanted.preset, vocab=512).to(mesh.device)
        generator = torch.Generator().manual_seed(mesh.rank)
        tokens = torch.randint(512, (wanted.rows, wanted.length + 1), generator=generator)
        ways = {f"buckets of {size:g} MiB": size for size in wanted.buckets}
        ways |= {"one bucket, at the end": EVERYTHING, "by hand, after backward": None}
        precision = torch.autocast("cuda", torch.bfloat16, enabled=mesh.device.type == "cuda")
        with precision:
            found = {
                way: measure(mesh, model, tokens.to(mesh.device), size, wanted.repeats)
                for way, size in ways.items()
            }
        reference, size, *_ = found["by hand, after backward"]
        # A ring adds the ranks' numbers in an order that depends on their place in the message. On
        # GPUs the backward pass itself adds in no fixed order, and what it adds is bf16.
        limit, worst = 1e-5 if mesh.device.type == "cpu" else 1e-2, 0.0
        for way, (gradients, sent, messages, step_s, alone_s) in found.items():
            far = ((gradients - reference).abs().max() / reference.abs().max()).item()
            assert far < limit, f"{way}: gradients {far:.1e} apart"
            assert sent == size, f"{way}: sent {sent} bytes, not {size}"
            worst = max(worst, far)
            if mesh.first:
                exposed = max(0.0, 1 - alone_s / step_s)
                print(
                    f"{way:24} {messages:3} message(s)   step {step_s * 1e3:6.1f} ms   "
                    f"exposed communication {exposed:4.0%}"
                )
        if mesh.first:
            print(
                f"{mesh.world} rank(s), {len(found)} ways: the same {size / 2**20:.2f} MiB sent, "
                f"gradients at most {worst:.0e} apart"
            )


if __name__ == "__main__":
    main()
