"""Pipeline parallelism: each rank holds some of the layers, and micro-batches pass through the ranks.

    torchrun --nproc_per_node=2 05-advanced/pipeline_parallelism.py
    torchrun --nproc_per_node=4 05-advanced/pipeline_parallelism.py --micro-batches 8

A rank waits until the first micro-batch reaches it, and again at the end: of N ranks and M
micro-batches, (N − 1) / (M + N − 1) of the time is this bubble, whatever the schedule. Schedules
differ in memory. GPipe runs all forward passes, then all backward passes, and keeps the activations of M
micro-batches. 1F1B starts a backward pass as soon as it can: stage s of N keeps those of N − s.

Asserted on every rank: loss and gradients are those of one process with all layers, under both
schedules, and each schedule has as many micro-batches in flight as said here.
"""

import argparse
import sys

from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from muster.data.batches import BatchPlan
from muster.data.loader import IGNORE, Loader
from muster.launch.cluster import own_arguments
from muster.launch.join import joined
from muster.parallel.materialise import materialise
from muster.parallel.pipeline import cut_evenly
from muster.recipe.load import load
from muster.tasks import build_task

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="llama-micro", help="any of muster's Llama shapes")
    parser.add_argument("--micro-batches", type=int, default=4, help="at least as many as ranks")
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    return parser.parse_args(own_arguments(sys.argv[1:]))


class InFlight:
    """Counts the micro-batches whose activations a stage holds: forward done, backward not begun."""

    def __init__(self, stage: nn.Module) -> None:
        self.now = self.most = 0
        stage.register_forward_hook(self.forward)

    def forward(self, _, args, output: Tensor) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        output.register_hook(self.backward)

    def backward(self, gradient: Tensor) -> None:
        self.now -= 1


def summed(logits: Tensor, targets: Tensor, vocab: int) -> Tensor:
    """The loss of all tokens that count; a GPU's logits have columns beyond the vocabulary."""
    logits = logits[..., :vocab].flatten(0, 1).float()
    return nn.functional.cross_entropy(
        logits, targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def run(name: str, task, ends: tuple[int, int], mesh, tokens, targets, loss_of, count: int):
    """One step of a schedule: this rank's gradients, the loss on the last rank, and the most
    micro-batches in flight. The first step also exchanges shapes, so the second one is measured."""
    part = task.build_part(*ends)
    materialise(part, task.weights(), mesh.device)  # by the seed alone: its share of the whole
    flight = InFlight(part)
    stage = PipelineStage(part, mesh.rank, mesh.world, mesh.device)
    schedule = SCHEDULES[name](stage, n_microbatches=count, loss_fn=loss_of, scale_grads=False)
    last = mesh.rank == mesh.world - 1
    for _ in range(2):
        part.zero_grad()
        flight.now = flight.most = 0
        losses: list[Tensor] = []
        schedule.step(
            *([tokens] if mesh.rank == 0 else []),  # only the first stage reads the batch …
            target=targets if last else None,  # … and only the last one has a loss
            losses=losses if last else None,
            return_outputs=False,
        )
    gradients = {n: p.grad for n, p in part.named_parameters()}
    return gradients, sum(loss.item() for loss in losses), flight.most


def main() -> None:
    wanted = options()
    sizes = [f"model.preset={wanted.preset}", f"data.sequence_length={wanted.length}"]
    recipe = load("llama-micro", sizes)
    task = build_task(recipe)
    source, count = task.source("train"), wanted.micro_batches
    with joined("pipeline") as mesh:
        if count < mesh.world or wanted.batch % count:
            raise SystemExit(
                f"--micro-batches {count}: use at least {mesh.world} that divide {wanted.batch}"
            )
        loader = Loader(source, BatchPlan(source.lengths, wanted.batch, recipe.seed), task.collate)
        (batch,) = loader.micro_batches(0)
        tokens, targets = (batch[name].to(mesh.device) for name in ("tokens", "targets"))
        whole = task.build_model()
        materialise(whole, task.weights(), mesh.device)

        def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
            """Divided by the tokens of all micro-batches: their gradients add up to the batch's."""
            return summed(logits, targets, whole.plan.vocab) / batch.units

        loss = loss_of(whole(tokens), targets)
        loss.backward()
        reference = {n: p.grad for n, p in whole.named_parameters()}
        cuts = cut_evenly(whole.plan.costs, mesh.world)  # the head counts as work
        limit = 1e-5 if mesh.device.type == "cpu" else 1e-4  # float32 sums in other orders
        worst, lines = 0.0, []
        for name in SCHEDULES:
            ends = cuts[mesh.rank]
            gradients, found, most = run(name, task, ends, mesh, tokens, targets, loss_of, count)
            for key, gradient in gradients.items():
                off = ((gradient - reference[key]).abs().max() / reference[key].abs().max()).item()
                assert off < limit, f"{name}: the gradient of {key} is {off:.1e} off"
                worst = max(worst, off)
            if mesh.rank == mesh.world - 1:
                assert abs(found / loss.item() - 1) < limit, f"{name}: loss {found}, not {loss}"
            expected = count if name == "GPipe" else min(count, mesh.world - mesh.rank)
            assert most == expected, f"{name}: {most} micro-batches in flight, not {expected}"
            lines.append((name, mesh.gather((ends, most))))
        worst = max(mesh.gather(worst))
        if mesh.first:
            for name, held in lines:
                for rank, ((start, stop), most) in enumerate(held):
                    print(f"{name:5}  rank {rank}: layers {start}–{stop - 1}, {most} in flight")
            bubble = (mesh.world - 1) / (count + mesh.world - 1)
            print(
                f"{mesh.world} stage(s), {count} micro-batches: gradients within {worst:.0e} of one "
                f"process; the bubble is {bubble:.0%} of a step"
            )


if __name__ == "__main__":
    main()
