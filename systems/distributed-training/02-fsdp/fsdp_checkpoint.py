"""Four ways to save a sharded model, each read back and compared bit for bit, optimizer included.

    torchrun --nproc_per_node=2 02-fsdp/fsdp_checkpoint.py
    torchrun --nproc_per_node=4 02-fsdp/fsdp_checkpoint.py --folder /shared/checkpoints

full          gathered on rank 0, one file: for small models and for giving away
sharded       each rank writes what it holds (torch.distributed.checkpoint)
asynchronous  the same, but training goes on while a thread writes
resharded     the sharded one, read by half as many ranks

Asserted: every one of them brings back the weights and AdamW's averages as they were when it was
saved. --folder must be one that all nodes share; the files lie in its fsdp_checkpoint/, and nothing
else there is touched.
"""

import argparse
import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_flatten_with_path

from muster import models
from muster.launch.join import joined
from muster.models.decoder import Decoder
from muster.parallel.mesh import Mesh

VOCAB = 256
LAYERS = 2  # every tensor is gathered ten times
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # on rank 0, empty elsewhere


def fresh(axes: DeviceMesh, device: torch.device, seed: int) -> tuple[Decoder, Optimizer]:
    """A sharded model and its optimizer; other seeds give other weights."""
    torch.manual_seed(seed)
    model = models.build("gpt2-micro", vocab=VOCAB, layers=LAYERS).to(device)
    for block in model.blocks.values():
        fully_shard(block, mesh=axes)
    fully_shard(model, mesh=axes)
    return model, AdamW(model.parameters(), lr=1e-3)


def step(model: nn.Module, optimizer: Optimizer, mesh: Mesh) -> None:
    tokens = torch.randint(VOCAB, (4, 33), generator=torch.Generator().manual_seed(mesh.rank))
    tokens = tokens.to(mesh.device)
    logits = model(tokens[:, :-1])[..., :VOCAB]
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: Optimizer) -> dict:
    """By parameter names, as shards: the same keys whatever the number of ranks."""
    weights, averages = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": averages}


def put(model: nn.Module, optimizer: Optimizer, state: dict, options=None) -> None:
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )


def whole(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Everything in full on rank 0, by name; the others help to gather it and get nothing."""
    found = tree_flatten_with_path(get_state_dict(model, optimizer, options=WHOLE))[0]
    return {str(name): t.clone() for name, t in found if isinstance(t, Tensor)}


def load_sharded(folder: Path, axes: DeviceMesh, mesh: Mesh) -> dict[str, Tensor]:
    """Into a model with other weights: each rank reads the parts of the files that it needs."""
    model, optimizer = fresh(axes, mesh.device, seed=1)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder, process_group=axes.get_group())
    put(model, optimizer, state)
    return whole(model, optimizer)


def compare(how: str, back: dict[str, Tensor], saved: dict[str, Tensor], mesh: Mesh) -> None:
    if not mesh.first:
        return
    assert back.keys() == saved.keys(), f"{how}: other tensors came back"
    wrong = [name for name in saved if not torch.equal(back[name], saved[name])]
    assert not wrong, f"{how}: {len(wrong)} of {len(saved)} tensors differ, such as {wrong[0]}"
    print(f"{how:13}{len(saved)} tensors as they were, bit for bit", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("runs/course"))
    folder = parser.parse_args().folder / "fsdp_checkpoint"
    with joined("fsdp") as mesh:
        if mesh.first:  # never save into a folder twice: half old, half new would look whole
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        mesh.barrier()
        axes = DeviceMesh(mesh.device.type, list(range(mesh.world)))
        model, optimizer = fresh(axes, mesh.device, seed=0)
        for _ in range(2):
            step(model, optimizer, mesh)
        saved = whole(model, optimizer)

        weights, averages = get_state_dict(model, optimizer, options=WHOLE)
        if mesh.first:
            torch.save({"model": weights, "optimizer": averages}, folder / "full.pt")
        mesh.barrier()
        # Mapped, not read: each rank takes its own shards out of the file.
        read = torch.load(folder / "full.pt", weights_only=True, mmap=True)
        other, its = fresh(axes, mesh.device, seed=1)
        put(other, its, read, StateDictOptions(full_state_dict=True))
        compare("full", whole(other, its), saved, mesh)

        dcp.save(state_of(model, optimizer), checkpoint_id=folder / "sharded")
        compare("sharded", load_sharded(folder / "sharded", axes, mesh), saved, mesh)

        # All ranks make the smaller world's group; only its members build and load.
        fewer = max(1, mesh.world // 2)
        small = DeviceMesh(mesh.device.type, list(range(fewer)))
        if mesh.rank < fewer:
            compare("resharded", load_sharded(folder / "sharded", small, mesh), saved, mesh)
        mesh.barrier()

        # The thread needs a group of its own: training keeps using the other one meanwhile.
        writing = dcp.async_save(
            state_of(model, optimizer),
            checkpoint_id=folder / "asynchronous",
            process_group=mesh.background,
        )
        step(model, optimizer, mesh)  # must not be in the checkpoint
        step(model, optimizer, mesh)
        writing.result()
        compare("asynchronous", load_sharded(folder / "asynchronous", axes, mesh), saved, mesh)
        later = whole(model, optimizer)
        if mesh.first:
            moved = sum(not torch.equal(later[name], saved[name]) for name in saved)
            assert moved > len(saved) / 2, "training stood still, so this proved nothing"
            print(
                f"claim holds: full, sharded, asynchronous and resharded ({mesh.world} → {fewer} rank(s)) "
                f"checkpoints equal the {len(saved)} tensors saved; {moved} had moved on meanwhile"
            )


if __name__ == "__main__":
    main()
