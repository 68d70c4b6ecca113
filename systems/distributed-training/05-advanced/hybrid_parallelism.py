"""Two or three ways of splitting at once: every matrix over neighbours, their shards over the rest.

    torchrun --nproc_per_node=4 05-advanced/hybrid_parallelism.py              # 2 shards × 2 pieces
    torchrun --nproc_per_node=8 05-advanced/hybrid_parallelism.py              # 2 copies × 2 × 2
    torchrun --nproc_per_node=4 05-advanced/hybrid_parallelism.py --tensor 4

A `DeviceMesh` gives each rank coordinates. Tensor parallelism talks in the middle of every block, so
its ranks are the innermost axis: neighbours on one machine. FSDP talks between blocks (weights are
gathered twice, gradients scattered once) and runs outside; copies only add up gradients. Ranks of one
tensor group see the same data.

Asserted on every rank: loss and gradient norm of each step are those of one process with it all,
in float32: bf16 would hide a wrong sum in its rounding.
"""

import argparse
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from muster.data.batches import BatchPlan
from muster.data.loader import Loader
from muster.launch.cluster import own_arguments
from muster.launch.join import joined
from muster.parallel.gradients import global_norm, local_gradients
from muster.parallel.layout import Layout
from muster.parallel.materialise import local_part, materialise
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


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tensor", type=int, help="pieces of each matrix; 2 where there are ranks")
    parser.add_argument("--preset", default="gpt2-micro", help="any of muster's GPT-2 shapes")
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step, over all ranks")
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args(own_arguments(sys.argv[1:]))


def make_axes(world: int, tensor: int, kind: str) -> DeviceMesh:
    """Ranks count along the last axis first: 0 and 1 share a matrix, 0 and 2 do not."""
    if world % tensor:
        raise SystemExit(f"--tensor {tensor} does not divide {world} ranks")
    data = world // tensor
    copies = 2 if data >= 4 and data % 2 == 0 else 1
    return init_device_mesh(
        kind, (copies, data // copies, tensor), mesh_dim_names=("replicate", "shard", "tensor")
    )


def split(model: nn.Module, axes: DeviceMesh) -> None:
    """Tensor first, on whole matrices; then FSDP cuts what each rank has left of them."""
    parallelize_module(model, axes["tensor"], PAIRS)
    data = axes["replicate", "shard"] if axes["replicate"].size() > 1 else axes["shard"]
    for block in model.blocks.values():
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)


def train(task, model, loader, mesh, layout: Layout, steps: int) -> list[float]:
    """Losses and gradient norms. FSDP averages gradients over the ranks that see different data, and
    each has as many tokens, so that is the gradient of the global mean."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    history = []
    for step in range(steps):
        (batch,) = loader.micro_batches(step)
        batch = batch.to(mesh.device)
        loss = task.loss(model(batch["tokens"]), batch) / batch.units
        loss.backward()
        norm = global_norm(local_gradients(model.parameters(), layout), layout)
        optimizer.step()
        optimizer.zero_grad()
        history += [mesh.sum(loss.item())[0] / mesh.world, norm]
    return history


def draw(mesh, axes: DeviceMesh, name: str, parameter) -> None:
    """The matrix as a table of ranks, with the rows that each of them holds."""
    rows, columns = local_part(parameter)[1]
    held = mesh.gather(f"{rows.start}–{rows.stop - 1}, {columns.start}–{columns.stop - 1}")
    if not mesh.first:
        return
    print(f"{name} {list(parameter.shape)}: rows and columns on each rank")
    for copy, shards in enumerate(axes.mesh.tolist()):
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
        axes = make_axes(mesh.world, wanted.tensor or min(2, mesh.world), mesh.device.type)
        tensor = axes["tensor"].size()
        data_rank, data_ranks = mesh.rank // tensor, mesh.world // tensor
        plan = BatchPlan(source.lengths, wanted.batch, recipe.seed)
        alone, mine = (
            Loader(source, plan, task.collate, rank=rank, ranks=ranks)
            for rank, ranks in ((0, 1), (data_rank, data_ranks))
        )
        model, reference = task.build_model(), task.build_model()
        split(model, axes)
        for each in (model, reference):
            materialise(each, task.weights(), mesh.device)  # by the seed alone, each rank its part
        layout = Layout(**{name: axes[name].size() for name in axes.mesh_dim_names})
        ours = train(task, model, mine, mesh, layout, wanted.steps)
        theirs = train(task, reference, alone, mesh, Layout(), wanted.steps)
        for name in ("blocks.0.feed_forward.up.weight", "blocks.0.feed_forward.down.weight"):
            draw(mesh, axes, name, model.get_parameter(name))
        far = max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))
        assert far < 1e-5, f"losses or gradient norms {far:.1e} apart"  # float32, another order
        if mesh.first:
            shape = " × ".join(f"{name} {axes[name].size()}" for name in axes.mesh_dim_names)
            print(f"loss, gradient norm by step: {' '.join(f'{x:.4f}' for x in ours)}")
            print(f"{shape}: losses and gradient norms within {far:.0e} of one process")


if __name__ == "__main__":
    main()
