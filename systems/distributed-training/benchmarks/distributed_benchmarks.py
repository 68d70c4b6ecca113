"""Communication and training, measured on the ranks at hand.

    torchrun --nproc_per_node=2 benchmarks/distributed_benchmarks.py
    torchrun --nproc_per_node=4 benchmarks/distributed_benchmarks.py --recipe gpt2 --largest 256

What the links carry, between all ranks and between two, and what training makes of it: how much of
DDP's and FSDP's communication hides under computing. The measurements are `muster bench`'s; this file
puts them on one page, and holds them against what the strategies promise:

- every value that arrives is right, in every collective and at every size;
- DDP sends each gradient once, however large its buckets are;
- FSDP gathers each block twice and scatters its gradients once, whatever it prefetches.
"""

import argparse
import sys
from pathlib import Path

import torch

from muster.bench import collectives, overlap, p2p, results
from muster.bench.files import prepare
from muster.launch.cluster import own_arguments
from muster.launch.join import joined
from muster.parallel.blocks import find_blocks
from muster.parallel.mesh import Mesh
from muster.recipe.load import load
from muster.tasks import build_task


def communication(mesh: Mesh, largest: int) -> list[dict]:
    """The largest array of each collective: there, bandwidth counts and latency does not."""
    found = [collectives.measure(mesh, largest=largest)]
    if mesh.world > 1:
        found.append(p2p.measure(mesh))
    if mesh.first:
        rows = [
            row
            for row in found[0]["rows"]
            if row["where"] == "out" or row["collective"] == "broadcast"
        ]
        for row in rows:
            if row["bytes"] > largest / 4:
                print(
                    f"  {row['collective']:<15} {row['bytes'] / 1e6:7.1f} MB"
                    f"  {row['algorithm_gb_per_s']:8.3f} GB/s  bus {row['bus_gb_per_s']:8.3f} GB/s"
                )
        for pair in found[1]["rows"] if mesh.world > 1 else []:
            print(
                f"  rank {pair['from']} → rank {pair['to']}: {pair['gb_per_s']:.3f} GB/s, {pair['latency_us']:.0f} µs"
            )
    return found


def training(mesh: Mesh, recipe: str, overrides: list[str], seconds: float) -> dict:
    found = overlap.measure(mesh, recipe, overrides, [1.0, 25.0], seconds)
    for row in found["rows"] if mesh.first else []:
        share = "?" if row["hidden"] is None else f"{row['hidden']:.0%}"
        print(
            f"  {row['strategy']:<5} {row['setting']:<18} {row['messages']:3} messages,"
            f" {row['bytes'] / 1e6:6.2f} MB, hidden {share}"
        )
    return found


def fsdp_messages(recipe: str, overrides: list[str]) -> int:
    """Two gatherings and a scattering of every block. What lies outside the blocks stays gathered
    between the passes: one of each."""
    with torch.device("meta"):
        model = build_task(load(recipe, overrides)).build_model()
    return 3 * len(find_blocks(model, model.plan.blocks, "model.preset")) + 2


def check(found: list[dict], messages: int, world: int) -> None:
    wrong = [row for document in found[:-1] for row in document["rows"] if row["wrong"]]
    assert not wrong, wrong
    rows = found[-1]["rows"]
    ddp = {row["bytes"] for row in rows if row["strategy"] == "ddp"}
    fsdp = {(row["bytes"], row["messages"]) for row in rows if row["strategy"] == "fsdp"}
    assert len(ddp) == len(fsdp) == 1, (ddp, fsdp)
    whole, (sent, count) = ddp.pop(), fsdp.pop()
    # Norms that look at the whole batch send messages of their own.
    assert count >= messages, f"FSDP sends {count} messages, not {messages}"
    # A rank brings all gradients to the scatterings and its shard to each gathering, which may be
    # rounded to bf16; shards are padded to one size.
    assert whole < sent <= whole * (1 + 2 / world) * 1.1, (whole, sent)
    print(
        f"all values right; DDP sends {whole / 1e6:.2f} MB a step, FSDP {sent / whole:.2f} × that"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="gpt-micro", help="what to train")
    parser.add_argument("--largest", type=int, default=4, metavar="MIB", help="array")
    parser.add_argument("--seconds", type=float, default=0.2, help="of each measurement of a step")
    parser.add_argument("--dir", type=Path, help="keep the figures there, as `muster bench` does")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    asked = parser.parse_intermixed_args(own_arguments(sys.argv[1:]))
    small = ["training.global_batch_size=1", "data.sequence_length=64"]
    overrides = asked.overrides or (small if asked.recipe == "gpt-micro" else [])
    # One process has one environment, and DDP's would keep FSDP from gathering while it computes.
    with joined("fsdp") as mesh:
        if mesh.first:
            print(f"communication, {mesh.world} rank(s) on {mesh.device.type}")
        found = communication(mesh, asked.largest * 2**20)
        if mesh.world > 1:
            if mesh.first:
                print(f"training {asked.recipe}")
            found.append(training(mesh, asked.recipe, overrides, asked.seconds))
        if mesh.first and asked.dir:
            prepare(asked.dir)
            for document in found:
                print(f"kept in {results.keep(document, asked.dir)}")
        if mesh.first and mesh.world > 1:
            check(found, fsdp_messages(asked.recipe, overrides), mesh.world)


if __name__ == "__main__":
    main()
