"""Several ways of splitting at once: every matrix over neighbours, their shards over the rest, and
the layers over two halves of the ranks.

    torchrun --nproc_per_node=4 05-advanced/hybrid_parallelism.py              # 2 shards × 2 pieces
    torchrun --nproc_per_node=8 05-advanced/hybrid_parallelism.py              # 2 copies × 2 × 2
    torchrun --nproc_per_node=4 05-advanced/hybrid_parallelism.py --tensor 4
    torchrun --nproc_per_node=4 05-advanced/hybrid_parallelism.py --pipeline 2  # 2 stages × 2 pieces

A `DeviceMesh` gives each rank coordinates. Tensor parallelism talks in the middle of every block, so
its ranks are the innermost axis: neighbours on one machine. FSDP talks between blocks (weights are
gathered twice, gradients scattered once) and runs outside; copies only add up gradients. A pipeline
talks least, once between its stages for each micro-batch, and is the outermost axis. Ranks of one
tensor group see the same data, and so do the stages of a pipeline.

Asserted on every rank: loss and gradient norm of each step are those of one process with it all,
in float32: bf16 would hide a wrong sum in its rounding.
"""

import argparse
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from muster.data.batches import BatchPlan
from muster.data.loader import Loader
from muster.launch.cluster import own_arguments
from muster.launch.join import joined
from muster.parallel.gradients import global_norm, local_gradients
from muster.parallel.layout import Layout
from muster.parallel.materialise import local_part, materialise
from muster.parallel.pipeline import cut_evenly
from muster.recipe.load import load
from muster.tasks import build_task

# The first matrix of a pair is cut by columns, the second by rows: what lies between them stays in
# pieces, and one all-reduce follows the pair. Attention's pairs are q, k, v and o: heads are cut.
PAIRS = {
    "blocks.*.attention.q": ColwiseParallel(),
    "blocks.*.attention.k": ColwiseParallel(),
    "blocks.*.attention.v": ColwiseParallel(),
    "blocks.*.attention.o": RowwiseParallel(),
    "blocks.*.feed_forward.up": ColwiseParallel(),
    "blocks.*.feed_forward.down": RowwiseParallel(),
}


AXES = ("pipeline", "replicate", "shard", "tensor")
MICRO_BATCHES = 4  # of a pipeline


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tensor", type=int, help="pieces of each matrix; 2 where there are ranks")
    parser.add_argument("--pipeline", type=int, choices=(1, 2), default=1, help="stages of layers")
    parser.add_argument("--preset", default="gpt2-micro", help="any of muster's GPT-2 shapes")
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step, over all ranks")
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args(own_arguments(sys.argv[1:]))


def make_axes(world: int, pipeline: int, tensor: int, kind: str) -> DeviceMesh:
    """Ranks count along the last axis first: 0 and 1 share a matrix, 0 and 2 do not."""
    if world % (pipeline * tensor):
        raise SystemExit(f"--pipeline {pipeline} × --tensor {tensor} does not divide {world} ranks")
    data = world // (pipeline * tensor)
    copies = 2 if data >= 4 and data % 2 == 0 else 1
    return init_device_mesh(kind, (pipeline, copies, data // copies, tensor), mesh_dim_names=AXES)


def split(model: nn.Module, axes: DeviceMesh) -> None:
    """Tensor first, on whole matrices; then FSDP cuts what each rank has left of them. The model may
    be a stage of a pipeline: layers were shared out before."""
    parallelize_module(model, axes["tensor"], PAIRS)
    data = axes["replicate", "shard"] if axes["replicate"].size() > 1 else axes["shard"]
    for block in model.blocks.values():
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)


class WholeModel:
    """Forward and backward pass of a model whose layers are all here."""

    tied = ()

    def __init__(self, task, model: nn.Module) -> None:
        self.task, self.model = task, model

    def backward(self, batch) -> float:
        """Returns the loss, the mean over this rank's tokens."""
        loss = self.task.loss(self.model(batch["tokens"]), batch) / batch.units
        loss.backward()
        return loss.item()


class Stages:
    """The same through two stages. GPT-2's head is its embedding, so both stages have that weight:
    its gradient is the sum of theirs."""

    def __init__(self, task, part: nn.Module, axes: DeviceMesh, device: torch.device) -> None:
        self.task, self.group = task, axes["pipeline"].get_group()
        self.rank = axes["pipeline"].get_local_rank()
        self.tied = [p for name, p in part.named_parameters() if name == "embed.tokens.weight"]
        stage = PipelineStage(part, self.rank, 2, device, group=self.group)
        self.schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=self.loss, scale_grads=False)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        micro_batch = replace(self.batch, tensors={"targets": targets})
        return self.task.loss(logits, micro_batch) / self.batch.units

    def backward(self, batch) -> float:
        self.batch, losses = batch, []
        last = self.rank == 1
        self.schedule.step(
            *([] if last else [batch["tokens"]]),
            target=batch["targets"] if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
        for weight in self.tied:
            dist.all_reduce(weight.grad.to_local(), group=self.group)
        total = torch.zeros((), device=batch["tokens"].device)  # the first stage has no losses
        for loss in losses:
            total += loss.detach()
        dist.all_reduce(total, group=self.group)
        return total.item()


def train(model, engine, loader, mesh, layout: Layout, steps: int) -> list[float]:
    """Losses and gradient norms. FSDP averages gradients over the ranks that see different data, and
    each has as many tokens, so that is the gradient of the global mean."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    history = []
    for step in range(steps):
        (batch,) = loader.micro_batches(step)
        loss = engine.backward(batch.to(mesh.device))
        norm = global_norm(local_gradients(model.parameters(), layout, engine.tied), layout)
        optimizer.step()
        optimizer.zero_grad()
        history += [mesh.sum(loss)[0] / mesh.world, norm]
    return history


def draw(mesh, axes: DeviceMesh, model: nn.Module, name: str) -> None:
    """The matrix as a table of ranks, with the rows that each of them holds: those of the first stage."""
    held, parameter = "", dict(model.named_parameters()).get(name)
    if parameter is not None:
        rows, columns = local_part(parameter)[1]
        held = f"{rows.start}–{rows.stop - 1}, {columns.start}–{columns.stop - 1}"
    held = mesh.gather(held)
    if not mesh.first:
        return
    print(f"{name} {list(parameter.shape)}: rows and columns on each rank")
    for copy, shards in enumerate(axes.mesh[0].tolist()):
        for shard, ranks in enumerate(shards):
            cells = "".join(f"│ rank {rank}: {held[rank]:18}" for rank in ranks)
            print(f"  copy {copy}, shard {shard} {cells}│")


def main() -> None:
    wanted = options()
    sizes = [f"model.preset={wanted.preset}", f"data.sequence_length={wanted.length}"]
    recipe = load("gpt-micro", sizes)
    task = build_task(recipe)
    source = task.source("train")
    with joined("hybrid") as mesh:
        stages, kind = wanted.pipeline, mesh.device.type
        axes = make_axes(mesh.world, stages, wanted.tensor or min(2, mesh.world // stages), kind)
        layout = Layout(**{name: axes[name].size() for name in AXES})
        data_rank, data_ranks = layout.data_rank(mesh.rank), layout.data_ranks
        plan = BatchPlan(source.lengths, wanted.batch, recipe.seed)
        alone, mine = (
            Loader(source, plan, task.collate, rank=rank, ranks=ranks)
            for rank, ranks in ((0, 1), (data_rank, data_ranks))
        )
        model, reference = task.build_model(), task.build_model()
        if stages > 1:
            cuts = cut_evenly(reference.plan.costs, stages)
            model = task.build_part(*cuts[layout.pipeline_rank(mesh.rank)])
        split(model, axes)
        for each in (model, reference):
            materialise(each, task.weights(), mesh.device)  # by the seed alone, each rank its part
        engine = WholeModel(task, model)
        if stages > 1:
            engine = Stages(task, model, axes, mesh.device)
        ours = train(model, engine, mine, mesh, layout, wanted.steps)
        theirs = train(reference, WholeModel(task, reference), alone, mesh, Layout(), wanted.steps)
        for name in ("blocks.0.feed_forward.up.weight", "blocks.0.feed_forward.down.weight"):
            draw(mesh, axes, model, name)
        far = max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))
        limit = 1e-5 if kind == "cpu" else 1e-4  # float32 sums in other orders
        assert far < limit, f"losses or gradient norms {far:.1e} apart"
        if mesh.first:
            named = AXES if stages > 1 else AXES[1:]
            shape = " × ".join(f"{name} {axes[name].size()}" for name in named)
            print(f"loss, gradient norm by step: {' '.join(f'{x:.4f}' for x in ours)}")
            print(f"{shape}: losses and gradient norms within {far:.0e} of one process")


if __name__ == "__main__":
    main()
