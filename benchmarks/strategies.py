"""What each strategy keeps on a rank, beside DDP.

    python benchmarks/strategies.py --recipe gpt-micro --ranks 4

Bytes of parameters, gradients and optimizer state are those of the tensors a rank really holds
between the backward pass and the optimizer's step, the largest over the ranks; DeepSpeed's float32
partitions count as optimizer state. Runs on CPU ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

from torch import Tensor
from torch.distributed.tensor import DTensor

from muster.checks.parity import rows_for, short_recipe
from muster.launch import cluster
from muster.launch.spawn import spawn

STEPS = 2


def storage_bytes(tensors: Iterable[Any]) -> int:
    found: dict[int, int] = {}
    for t in tensors:
        if isinstance(t, Tensor):
            storage = (t.to_local() if isinstance(t, DTensor) else t).untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def held(engine: Any) -> dict[str, int]:
    """Measured between the backward pass and the optimizer's step."""
    parameters = [p for part in engine.parts for p in part.parameters()]
    zero = getattr(engine, "engine", None) is not None
    optimizer = engine.optimizer.optimizer if zero else engine.optimizer
    moments = [t for s in optimizer.state.values() for n, t in s.items() if n != "step"]
    gradients: list[Any] = [p.grad for p in parameters]
    if zero:
        gradients += [
            g for group in engine.optimizer.averaged_gradients.values() for g in group or ()
        ]
        flat = "fp32_partitioned_groups_flat"
        other = "single_partition_of_fp32_groups"
        moments += getattr(engine.optimizer, flat if hasattr(engine.optimizer, flat) else other)
    return {
        "parameters": storage_bytes(getattr(p, "ds_tensor", p) for p in parameters),
        "gradients": storage_bytes(gradients),
        "optimizer": storage_bytes(moments),
    }


def measure(recipe: Any, mesh: Any, folder: Path) -> dict[str, int]:
    """In the second step: by then AdamW has its averages."""
    from muster import run_directory
    from muster.training import loop
    from muster.worker.prepare import prepare

    if mesh.first:
        (folder / "ranks").mkdir(parents=True)
    mesh.barrier()
    job = prepare(recipe, mesh, run_directory.Run(folder))
    found: dict[str, int] = {}
    clip = job.engine.clip_

    def look(*args: Any, **kwargs: Any) -> float:
        norm = clip(*args, **kwargs)
        found.update(held(job.engine))
        return norm

    job.engine.clip_ = look  # type: ignore[method-assign]
    for part in job.engine.parts:
        part.train()
    batches = job.loader.steps(0, STEPS)
    for step in range(STEPS):
        loop._step(job, step, batches)
    job.observer.close()
    everyone = job.mesh.gather(found)
    return {key: max(one[key] for one in everyone) for key in found}


def rank(name: str, folder: str) -> None:
    from muster.parallel import mesh as meshes
    from muster.parallel.layout import Layout
    from muster.recipe.load import load

    rank_info = cluster.detect(os.environ)
    mesh = meshes.join(
        rank_info.rank, rank_info.local_rank, Layout(replicate=rank_info.world), "gloo", 300.0
    )
    lines = []
    for number, row in enumerate(rows_for(mesh.world)):
        options = [f"training.steps={STEPS}", "training.global_batch_size=16", *row.options]
        recipe = load(name, short_recipe(options))
        lines.append((row.name, measure(recipe, mesh, Path(folder, str(number)))))
    if mesh.first:
        Path(folder, "table.json").write_text(json.dumps(lines))
    mesh.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="gpt-micro")
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank, (args.recipe, folder), args.ranks)
        lines = json.loads(Path(folder, "table.json").read_text())
    base = dict(lines)["ddp"]
    print(f"{args.recipe} on {args.ranks} ranks, as shares of DDP's")
    print(
        "| strategy | parameters | gradients | optimizer | sent per step |\n|---|---|---|---|---|"
    )
    for name, found in lines:
        print(f"| {name} | " + " | ".join(f"{found[k] / base[k]:.2f}" for k in base) + " |")


if __name__ == "__main__":
    main()
