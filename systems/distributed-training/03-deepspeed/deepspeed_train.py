"""ZeRO with DeepSpeed: the same training, with optimizer, gradients or weights in shards.

    deepspeed --num_gpus=4 03-deepspeed/deepspeed_train.py \
        --deepspeed_config 03-deepspeed/configs/zero2_config.json
    torchrun --nproc_per_node=2 03-deepspeed/deepspeed_train.py      # the three stages in turn

Three calls are all that a loop sees of DeepSpeed: `deepspeed.initialize` wraps the model and makes
the JSON file's optimizer, `engine.backward` reduces gradients, `engine.step` clips, updates and
clears. Asserted for each file, on every rank: losses and gradient norms are those of plain PyTorch
in one process on the same global batches, and what the stage promises to cut is cut in N.
"""

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

from muster.data.batches import BatchPlan
from muster.data.loader import Loader
from muster.launch.cluster import own_arguments
from muster.launch.join import joined
from muster.parallel.deepspeed import library
from muster.parallel.materialise import materialise
from muster.recipe.load import load
from muster.tasks import build_task

CONFIGS = [Path(__file__).parent / "configs" / f"zero{stage}_config.json" for stage in (1, 2, 3)]
warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # DeepSpeed's older names


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--deepspeed_config", type=Path, nargs="+", default=CONFIGS)
    parser.add_argument("--preset", default="gpt2-micro", help="any of muster's decoders")
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps, at least 2")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches per step")
    return parser.parse_args(own_arguments(sys.argv[1:]))


def fresh_model(task, mesh) -> nn.Module:
    model = task.build_model()
    materialise(model, task.weights(), mesh.device)  # by the seed alone: alike on every rank
    return model


def mean_loss(task, model, batch):
    """All sequences are equally long: the mean over micro-batches and ranks is the global mean."""
    return task.loss(model(batch["tokens"]), batch) / batch.units


def train(task, config, loader, mesh, steps):
    """Losses and gradient norms by step, and the share of each kind of state that lies here."""
    deepspeed = library()  # `import deepspeed`, told not to compile a transport for CPUs
    engine, optimizer, _, _ = deepspeed.initialize(model=fresh_model(task, mesh), config=config)
    history, held = [], {}
    for step in range(steps):
        losses = []
        for batch in loader.micro_batches(step):
            loss = mean_loss(task, engine, batch.to(mesh.device))
            engine.backward(loss)  # divides by the accumulation and averages over ranks
            if step and not losses:  # between micro-batches, when the optimizer has its state
                held = shares_held(engine.module, optimizer)
            engine.step()  # counts micro-batches: only the last one updates
            losses.append(loss.item())
        loss = mesh.sum(sum(losses) / len(losses))[0] / mesh.world
        history += [loss, float(engine.get_global_grad_norm())]
    return history, held


def train_alone(task, config, loader, mesh, steps):
    """The reference: each global batch whole, in one process, without DeepSpeed."""
    model = fresh_model(task, mesh)
    settings = {k: v for k, v in config["optimizer"]["params"].items() if k != "torch_adam"}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    history = []
    for step in range(steps):
        (batch,) = loader.micro_batches(step)
        loss = mean_loss(task, model, batch.to(mesh.device))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
        history += [loss.item(), norm.item()]
    return history


def shares_held(model: nn.Module, optimizer) -> dict[str, float]:
    """What lies on this rank, over what the whole model would need."""
    parameters = list(model.parameters())
    whole = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
    gathered = [p.data for p in parameters] + [getattr(p, "ds_tensor", None) for p in parameters]
    buffers = [optimizer.averaged_gradients, getattr(optimizer, "all_grad_tensors", {})]
    reduced = [g for kept in buffers for group in kept.values() for g in group or ()]
    moments = [s[k] for s in optimizer.optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    return {
        "optimizer": elements(moments) / whole / 2,
        "gradients": elements([p.grad for p in parameters] + reduced) / whole,
        "weights": elements(gathered) / whole,
    }


def elements(tensors) -> float:
    """Numbers that fit in the memory behind these tensors, which some of them share."""
    memory = {t.untyped_storage().data_ptr(): t for t in tensors if t is not None}
    return sum(t.untyped_storage().nbytes() / t.element_size() for t in memory.values())


def main() -> None:
    wanted = options()
    sizes = [f"model.preset={wanted.preset}", f"data.sequence_length={wanted.length}"]
    recipe = load("gpt-micro", sizes)
    task = build_task(recipe)
    source = task.source("train")
    with joined("zero3") as mesh:
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed wants it of a lone process too
        for path in wanted.deepspeed_config:
            config = json.loads(path.read_text())
            config["gradient_accumulation_steps"] = wanted.accumulation
            config["bf16"]["enabled"] = mesh.device.type == "cuda"
            plan = BatchPlan(source.lengths, config["train_batch_size"], recipe.seed)
            mine = {"rank": mesh.rank, "ranks": mesh.world, "accumulation": wanted.accumulation}
            loader = Loader(source, plan, task.collate, **mine)
            ours, held = train(task, config, loader, mesh, wanted.steps)
            whole = Loader(source, plan, task.collate)
            theirs = train_alone(task, config, whole, mesh, wanted.steps)
            check(mesh, config, ours, theirs, held)


def check(mesh, config, ours, theirs, held) -> None:
    stage = config["zero_optimization"]["stage"]
    far = max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))
    # float32 sums in another order; bf16 weights carry 8 bits, and so does each gradient
    assert far < (2e-2 if config["bf16"]["enabled"] else 1e-5), f"losses or norms {far:.1e} apart"
    for kind, first in (("optimizer", 1), ("gradients", 2), ("weights", 3)):
        wanted = 1 / mesh.world if stage >= first else 1.0
        # A tensor across a border, or too small to cut, is kept whole by some rank.
        assert wanted * 0.99 < held[kind] < wanted + 0.15, f"stage {stage}: {kind} {held[kind]:.2f}"
    if mesh.first:
        shares = ", ".join(f"{kind} {share:.0%}" for kind, share in held.items())
        print(f"loss, gradient norm by step: {' '.join(f'{x:.4f}' for x in ours)}")
        print(
            f"ZeRO-{stage} on {mesh.world} rank(s): losses and gradient norms within {far:.0e} of one "
            f"process without DeepSpeed; each rank holds: {shares}"
        )


if __name__ == "__main__":
    main()
